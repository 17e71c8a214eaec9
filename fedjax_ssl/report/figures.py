"""The report's pictures: functions from the records of runs to a figure. Call them inside `style.styled()`."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba_array
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedjax_ssl.records.clients import client_sizes
from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.runs import RunRecords
from fedjax_ssl.report.style import CLASS_COLOURS, COLOURS, COUNTS, INK, NONE, SMALL, WIDE, curve_style, subplots

MANY = 20  # with more classes, cells and bars have no numbers


def over_rounds(groups: list[Group], metric: str, label: str, top: float | None = None) -> Figure | None:
    """A metric over rounds, one curve for each group that has it: the mean over its seeds, with a band of their range.

    Args:
        groups: to be compared.
        metric: its name in the records.
        label: of the axis.
        top: the metric is a share of it, such as 100 for percent, and the axis ends there; None: it is no share.
    """
    if not any(group.has(metric) for group in groups):
        return None
    figure, axes = subplots(figsize=SMALL)
    for number, group in enumerate(groups):  # a group's number is its colour in every picture
        if group.has(metric):
            values = (top or 1) * group.values(metric)
            draw_band(axes, np.arange(1, values.shape[1] + 1), values, group.name, number)
    finish_curves(figure, axes, label, top, legend=len(groups) > 1)
    return figure


def _of_run(run: RunRecords, names: dict[str, str], label: str, top: float | None = None) -> Figure | None:
    """As `over_rounds`, the metrics of one run that are in `names`, name -> words for the legend."""
    names = {name: words for name, words in names.items() if run.has(name)}
    if not names:
        return None
    figure, axes = subplots(figsize=SMALL)
    for number, (name, words) in enumerate(names.items()):
        draw_band(axes, run.values("round"), (top or 1) * run.values(name)[None], words, number)
    finish_curves(figure, axes, label, top)
    return figure


def losses(run: RunRecords) -> Figure | None:
    """Every loss that the run recorded, over rounds."""
    names = [name for name in run.metrics[0] if name.endswith("_loss")]
    names.sort(key=lambda name: name != f"{run.measured}_loss")
    return _of_run(run, {name: name.removesuffix("_loss").replace("_", " ") for name in names}, "loss (nats)")


def measures(run: RunRecords) -> Figure | None:
    """The measures besides accuracy, as curves over rounds, with the accuracy for comparison."""
    names = {f"{run.measured}_{name}": words for name, words in run.measures().items()}
    if not any(map(run.has, names)):
        return None
    names = {f"{run.measured}_accuracy": "accuracy", **names}
    return _of_run(run, names, f"on the {run.measured} set (%)", top=100)


def pseudo_labels(run: RunRecords) -> Figure | None:
    """Accuracy of the pseudo-labels of each rule, and of those that qualified (FedAnchor's Figures 3d and 9)."""
    names = {**run.labelling_rules(), "qualified_accuracy": "those trained on"}
    return _of_run(run, names, "pseudo-labels that are right (%)", top=100)


def qualified(groups: list[Group]) -> Figure | None:
    """Examples that a client trains on, over rounds (FedAnchor's Figures 2 and 3c)."""
    figure = over_rounds(groups, "qualified_per_client", "qualified examples per client")
    if figure is not None:
        figure.axes[0].set_ylim(bottom=0)
    return figure


def scores(run: RunRecords) -> Figure | None:
    """The scores of labelling, means over the cohort's images; for methods that record them."""
    names = {"score_gap": "best minus second class", "common_direction": "along the common direction"}
    return _of_run(run, names, "score", top=1)


def bytes_over_rounds(run: RunRecords) -> Figure:
    """Bytes sent, in each round and in total."""
    figure, (each, total) = subplots(1, 2, figsize=WIDE)
    for number, (name, label) in enumerate({"bytes_down": "down", "bytes_up": "up"}.items()):
        values = run.values(name) / 1e6
        draw_band(each, run.values("round"), values[None], label, number)
        draw_band(total, run.values("round"), np.cumsum(values)[None], label, number)
    finish_curves(figure, each, "MB in a round", legend=False)
    finish_curves(figure, total, "MB since the beginning", legend=False)
    for axes in (each, total):
        axes.set_ylim(bottom=0)
    legend_above(figure, each)
    return figure


def accuracy(groups: list[Group], measured: str) -> Figure | None:
    """Accuracy over rounds of the groups that measure this set each round, 'test' or 'validation'."""
    if not any(group.measured == measured for group in groups):
        return None
    return over_rounds(groups, f"{measured}_accuracy", f"{measured} accuracy (%)", top=100)


def accuracy_over_bytes(groups: list[Group], measured: str) -> Figure | None:
    """Accuracy as in `accuracy`, over the bytes sent both ways, up to the end of each group's shortest run."""
    if not any(group.measured == measured for group in groups):
        return None
    figure, axes = subplots(figsize=SMALL)
    for number, group in enumerate(groups):
        if group.measured == measured:
            travelled = np.cumsum(group.values("bytes_down") + group.values("bytes_up"), axis=1) / 1e6
            # A mean over fewer runs could go back.
            end = min(len(run.metrics) for run in group.runs)
            shares = group.values(f"{measured}_accuracy")[:, :end]
            draw_band(axes, travelled[:, :end].mean(axis=0), 100 * shares, group.name, number)
    finish_curves(figure, axes, f"{measured} accuracy (%)", top=100, legend=len(groups) > 1)
    axes.set_xlabel("MB travelled, both ways")
    return figure


def time_spent(run: RunRecords, profile: dict[str, Any] | None = None) -> Figure:
    """Where the time went: by kind and, if there is a profile, by stage of the round."""
    kinds = {"compiling": "compile_seconds", "before the first round": "init_seconds", "rounds": "seconds",
             "checkpoints": "checkpoint_seconds"}  # fmt: skip
    spent = {label: run.seconds(name) for label, name in kinds.items()}
    figure, all_axes = subplots(1, 2 if profile else 1, figsize=WIDE if profile else SMALL, squeeze=False)
    draw_bars(all_axes[0, 0], spent, "seconds in all")
    if profile:
        draw_bars(all_axes[0, 1], profile["seconds_by_stage"], "seconds in a round, by stage")
    return figure


MOST_COLUMNS = 1_000  # a heat map shows at most so many clients one by one


def who_holds_what(counts: dict[str, np.ndarray], class_names: list[str], noun: str = "images") -> Figure | None:
    """Each client's images by class, those of them with labels, and how many images of each class are labelled where.

    Args:
        counts: see `fedjax_ssl.data.class_counts`; {} makes no picture.
        class_names: of all classes.
        noun: word for the examples.
    """
    if not counts:
        return None
    clients, labelled, at_server = counts["clients"], counts["labelled"], counts["server"]
    num_clients, num_classes = clients.shape
    place, at_clients = np.arange(num_classes), labelled.any()
    size = (WIDE[0], 1.65 * WIDE[1]) if at_clients else WIDE
    figure, axes = subplots(1 + int(at_clients), 2, figsize=size, squeeze=False, width_ratios=(3, 2))
    _client_heat(figure, axes[0, 0], clients, f"{noun.capitalize()} at each client", class_names, noun)
    bars, before, unlabelled = axes[0, 1], "before: the training set", "after: all clients"
    held = client_sizes(counts).sum()
    title = f"{at_server.sum():,} labels at the server,\n{held:,} {noun} at {num_clients:,} clients"
    if at_clients:
        _client_heat(figure, axes[1, 0], labelled, "Those of them that have labels", class_names, noun)
        grid = axes[0, 1].get_gridspec()
        for each in axes[:, 1]:
            each.remove()
        bars, before, unlabelled = figure.add_subplot(grid[:, 1]), "the training set", "at clients, without labels"
        title = f"{labelled.sum():,} of {held:,} {noun} labelled"
        title += f",\n{at_server.sum():,} labels at the server" if at_server.any() else ""
    bars.barh(place - 0.2, counts["train"], 0.4, color=COLOURS[4], label=before)
    left = np.zeros(num_classes, int)
    for label, numbers, colour in (
        ("at clients, with labels", labelled.sum(axis=0), COLOURS[1]),
        (unlabelled, (clients - labelled).sum(axis=0), COLOURS[0]),
        ("at the server, with labels", at_server, COLOURS[3 if at_clients else 1]),
        ("held out for validation", counts["validation"], COLOURS[2]),
    ):
        if numbers.any():
            bars.barh(place + 0.2, numbers, 0.4, left=left, color=colour, label=label)
            left += numbers
    bars.invert_yaxis()
    bars.set(xlabel=noun, title=title)
    label_classes(bars.yaxis, class_names)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def label_profile(counts: dict[str, np.ndarray]) -> Figure | None:
    """The share of each client's images that has labels, in ascending order, and the number of those images.

    If there are more clients than a picture can show, a bar is the mean of several clients.

    Args:
        counts: see `fedjax_ssl.data.class_counts`; {} makes no picture.
    """
    if not counts:
        return None
    sizes, labelled = client_sizes(counts), counts["labelled"].sum(axis=1)
    shares = labelled / np.maximum(sizes, 1)
    order = np.argsort(shares, kind="stable")
    bars = np.array_split(order, min(len(order), MOST_COLUMNS))
    each_bar = "" if len(bars) == len(order) else f", {len(order) / len(bars):,.0f} to a bar"
    figure, axes = subplots(1, 2, figsize=WIDE, squeeze=False)
    for each, numbers, title in (
        (axes[0, 0], 100 * shares, "percent of its examples with labels"),
        (axes[0, 1], labelled, "its examples with labels"),
    ):
        each.bar(np.arange(len(bars)), [numbers[own].mean() for own in bars], width=0.9, color=COLOURS[1])
        each.set(xlabel=f"client, in the order of shares{each_bar}", title=title, ylim=(0, None))
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylim(0, 100)
    return figure


def _client_heat(
    figure: Figure, axes: Axes, numbers: np.ndarray, title: str, class_names: list[str], noun: str
) -> None:
    """Numbers of images by client and class [K, C] as a heat map; 0 is grey, so that a single image can be seen.

    If there are more clients than a picture can show: how many clients have how many images of a class.
    """
    scale, label = colormaps[COUNTS].with_extremes(bad=NONE), "clients that have so many"
    if len(numbers) > MOST_COLUMNS:
        edges = np.unique(np.geomspace(1, int(numbers.max(initial=1)) + 1, 40).astype(int))
        shown = np.ma.masked_equal([np.histogram(own, edges)[0] for own in numbers.T], 0)
        image = axes.pcolormesh(edges - 0.5, np.arange(len(shown) + 1) - 0.5, shown, cmap=scale, vmin=0)
        axes.set(xlabel=f"{noun} of the class", xscale="log")
        axes.invert_yaxis()
    else:
        shown, label = np.ma.masked_equal(numbers.T, 0), noun
        image = axes.imshow(shown, aspect="auto", cmap=scale, vmin=0, interpolation="nearest", rasterized=True)
        axes.set(xlabel="client")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(ylabel="class", title=title)
    axes.grid(False)
    figure.colorbar(image, ax=axes, label=label, ticks=MaxNLocator(6, integer=True))
    label_classes(axes.yaxis, class_names)


def latent_space(
    planes: dict[int, tuple[np.ndarray, np.ndarray]], class_names: list[str], sets: Mapping[int, str] = {}
) -> Figure:
    """The latent space after each of the given rounds, with class centroids as stars (FedAnchor's Figure 5).

    Args:
        planes: round -> (positions in the plane [n, 2], labels [n]).
        class_names: of all classes.
        sets: round -> the set whose images are shown, for the titles that must name it.
    """
    count = len(planes)
    columns = min(count, 4)
    rows = -(-count // columns)
    size = (SMALL[0], SMALL[0]) if count == 1 else (2.4 * columns + 0.2, 2.5 * rows + 0.6)
    figure, all_axes = subplots(rows, columns, figsize=size, squeeze=False)
    if len(class_names) <= len(CLASS_COLOURS):
        colours = to_rgba_array(CLASS_COLOURS[: len(class_names)])
    else:
        colours = colormaps["turbo"](np.linspace(0, 1, len(class_names)))
    for axes in all_axes.flat[count:]:
        axes.remove()
    for axes, (number, (positions, labels)) in zip(all_axes.flat, planes.items()):
        axes.scatter(*positions.T, c=colours[labels], s=5, linewidths=0, alpha=0.75, rasterized=True)
        for label in np.unique(labels):
            centre = positions[labels == label].mean(axis=0)
            axes.scatter(*centre, marker="*", s=190, color=colours[label], edgecolors=INK, linewidths=0.7)
            # A name next to the star, since ten colours are hard to distinguish.
            axes.annotate(class_names[label], centre, (6, 4), textcoords="offset points", fontsize=8, weight="bold")
        title = f"round {number}" if number else "before the first round"
        axes.set(xticks=[], yticks=[], title=f"{title}, {sets[number]}" if number in sets else title)
        axes.spines[:].set_visible(False)  # positions in the plane have no meaning by themselves
    return figure


def confusion(labels: np.ndarray, predictions: np.ndarray, class_names: list[str]) -> Figure:
    """How images of each class were classified, percent of the class."""
    share = _shares(labels, predictions, len(class_names))
    figure, axes = subplots(figsize=(SMALL[0], 4.2))
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=100, interpolation="nearest", rasterized=True)
    axes.set(xlabel="classified as", ylabel="class")
    axes.grid(False)
    label_classes(axes.xaxis, class_names, rotate=True)
    label_classes(axes.yaxis, class_names)
    figure.colorbar(image, ax=axes, label="% of the class", shrink=0.8)
    if len(class_names) <= MANY:
        for row, column in np.ndindex(*share.shape):
            if share[row, column] >= 0.5:
                colour = "white" if share[row, column] > 60 else "#262727"  # dark on the light cells of every page
                axes.text(column, row, f"{share[row, column]:.0f}", ha="center", va="center", fontsize=7, color=colour)
    return figure


def _shares(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """float [C, C]: percent of the class of the row that were classified as that of the column; 0 without any."""
    from sklearn.metrics import confusion_matrix  # takes a second to import

    matrix = confusion_matrix(labels, predictions, labels=range(num_classes))
    return 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)


def class_accuracy(labels: np.ndarray, predictions: np.ndarray, class_names: list[str], of: str = "test") -> Figure:
    """Accuracy on the images of each class of a set, 'test' or 'validation'; the line is the accuracy over all."""
    share = np.diag(_shares(labels, predictions, len(class_names)))
    figure, axes = subplots(figsize=(SMALL[0], 4.2))
    place = np.arange(len(class_names))
    axes.barh(place, share, color=COLOURS[0])
    axes.axvline(100 * np.mean(labels == predictions), color=COLOURS[5], linestyle="--")
    axes.invert_yaxis()
    xlabel = f"{of} examples of the class classified right (%), and of all (dashed)"
    axes.set(xlabel=xlabel, ylabel="class", xlim=(0, 100))
    label_classes(axes.yaxis, class_names)
    axes.grid(False, axis="y")
    if len(class_names) <= MANY:
        for row, value in zip(place, share):
            axes.text(1, row, f"{value:.1f}", va="center", fontsize=7, color="white")
    return figure


def client_accuracy(accuracies: Mapping[str, list[np.ndarray]], on: str = "the client's mix") -> Figure | None:
    """Accuracies of clients from the worst to the best, one curve for each model; the worst tenth is shaded.

    Args:
        accuracies: name of a model -> its accuracy on each client's mix of classes, float [K], for each seed; NaN for
            clients without images.
        on: the images, for the label of the axis.
    """
    if not any(accuracies.values()):
        return None
    figure, axes = subplots(figsize=SMALL)
    place = np.linspace(0, 100, 201)
    for number, (name, seeds) in enumerate(accuracies.items()):
        curves = []
        for of_seed in seeds:
            present = np.sort(of_seed[np.isfinite(of_seed)])
            if len(present):  # client k of K stands for the share from k to k + 1
                curves.append(100 * present[np.minimum((place / 100 * len(present)).astype(int), len(present) - 1)])
        if curves:
            draw_band(axes, place, np.stack(curves), name, number)
    axes.axvspan(0, 10, color=INK, alpha=0.08, linewidth=0)
    finish_curves(figure, axes, f"accuracy on {on} (%)", top=100, legend=len(accuracies) > 1)
    axes.set(xlabel="clients, from the worst on (%)", xlim=(0, 100))
    return figure


def draw_band(axes: Axes, x: np.ndarray, values: np.ndarray, label: str, number: int) -> None:
    """Draws curve `number` (0, 1, ...): the mean of values [seeds, rounds], and their range as a band."""
    style = curve_style(number)
    alone: dict[str, Any] = {"marker": "o", "markersize": 4} if values.shape[1] == 1 else {}  # one round makes no line
    if label.startswith("_"):  # matplotlib would leave it out of the legend
        label = f"\u200b{label}"
    axes.plot(x, nan_mean(values), label=label, **style, **alone)
    if len(values) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # rounds without a value
            low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def nan_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the seeds that have a value, float [rounds]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=0)


def finish_curves(figure: Figure, axes: Axes, label: str, top: float | None = None, legend: bool = True) -> None:
    """Labels the axes, and adds the legend above the curves, so that it covers none of them."""
    axes.set(xlabel="round", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if top is not None and axes.get_ylim()[1] > top:
        axes.set_ylim(top=top + 0.5)
    if legend:
        legend_above(figure, axes)


def legend_above(figure: Figure, axes: Axes) -> None:
    """Adds a legend above a picture, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        letters = 15 * figure.get_figwidth()  # approximately, on a line
        columns = max(1, min(len(labels), int(letters // (max(map(len, labels)) + 6))))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def draw_bars(axes: Axes, values: dict[str, float], label: str) -> None:
    """Draws horizontal bars with their values."""
    place = np.arange(len(values))
    axes.barh(place, list(values.values()), color=COLOURS[0])
    axes.set_yticks(place, list(values))
    axes.invert_yaxis()
    axes.set(xlabel=label)
    axes.grid(False, axis="y")
    widest = max(values.values()) or 1.0
    axes.set_xlim(0, 1.18 * widest)
    for row, value in enumerate(values.values()):
        axes.text(value + 0.01 * widest, row, f"{value:.3g}", va="center", fontsize=8, color=INK)


def label_classes(axis: Any, class_names: list[str], rotate: bool = False) -> None:
    """Sets a tick for every class, or for some of them if there are many."""
    if len(class_names) <= MANY:
        turned = {"rotation": 60, "ha": "right"} if rotate and max(map(len, class_names)) > 2 else {}
        axis.set_ticks(range(len(class_names)), class_names, **turned)
        axis.set_tick_params(length=0)
