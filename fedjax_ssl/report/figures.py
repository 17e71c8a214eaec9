"""The report's pictures: functions from the records of runs to a figure. Call them inside `style.styled()`."""

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
MOST_COLUMNS = 1_000  # a heat map shows at most so many clients one by one

Curve = tuple[np.ndarray, np.ndarray] | None  # x [n] and values [seeds, n]; None: missing, but its colour is not free


def curves(
    drawn: Mapping[str, Curve], label: str, top: float | None = None, xlabel: str = "round", legend: bool = True
) -> Figure | None:
    """Curves by name, each the mean over its seeds with a band of their range; None if all are missing.

    The axis ends at `top`, of which the values are a share, such as 100 for percent; None: they are no share.
    """
    if all(curve is None for curve in drawn.values()):
        return None
    figure, axes = subplots()
    for number, (name, curve) in enumerate(drawn.items()):
        if curve is not None:
            draw_band(axes, *curve, name, number)
    finish_curves(figure, axes, label, top, legend)
    axes.set_xlabel(xlabel)
    return figure


def over_rounds(groups: list[Group], metric: str, label: str, top: float | None = None) -> Figure | None:
    """A metric over rounds, one curve for each group that has it; see `curves`."""
    drawn: dict[str, Curve] = dict.fromkeys([group.name for group in groups])
    for group in groups:
        if group.has(metric):
            values = (top or 1) * group.values(metric)
            drawn[group.name] = np.arange(1, values.shape[1] + 1), values
    return curves(drawn, label, top, legend=len(groups) > 1)


def _of_run(run: RunRecords, names: dict[str, str], label: str, top: float | None = None) -> Figure | None:
    """As `over_rounds`, the metrics of one run that are in `names`, name -> words for the legend."""
    rounds, found = run.values("round"), {words: name for name, words in names.items() if run.has(name)}
    return curves({words: (rounds, (top or 1) * run.values(name)[None]) for words, name in found.items()}, label, top)


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


def by_client(rounds: np.ndarray, values: np.ndarray, label: str) -> Figure | None:
    """A metric with a number for each client, float [rounds, K], over rounds: a curve for each client that has one."""
    clients = np.flatnonzero(np.isfinite(values).any(axis=0))
    drawn = {f"client {client}": (rounds, values[None, :, client]) for client in clients}
    return curves(drawn, label, legend=len(drawn) <= MANY)


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
    return over_rounds(groups, f"{measured}_accuracy", f"{measured} accuracy (%)", top=100)


def accuracy_over_bytes(groups: list[Group], measured: str) -> Figure | None:
    """Accuracy as in `accuracy`, over the bytes sent both ways, up to the end of each group's shortest run."""
    drawn: dict[str, Curve] = dict.fromkeys([group.name for group in groups])
    for group in groups:
        if group.measured == measured:
            travelled = np.cumsum(group.values("bytes_down") + group.values("bytes_up"), axis=1) / 1e6
            # A mean over fewer runs could go back.
            end = min(len(run.metrics) for run in group.runs)
            shares = group.values(f"{measured}_accuracy")[:, :end]
            drawn[group.name] = travelled[:, :end].mean(axis=0), 100 * shares
    return curves(drawn, f"{measured} accuracy (%)", 100, "MB travelled, both ways", legend=len(groups) > 1)


def time_spent(run: RunRecords) -> Figure:
    """Where the time went."""
    kinds = {"compiling": "compile_seconds", "before the first round": "init_seconds", "rounds": "seconds",
             "checkpoints": "checkpoint_seconds"}  # fmt: skip
    spent = [run.seconds(name) for name in kinds.values()]
    figure, axes = subplots(figsize=SMALL)
    axes.bar_label(axes.barh(list(kinds), spent, color=COLOURS[0]), fmt="%.3g", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="seconds in all", xmargin=0.18)
    axes.grid(False, axis="y")
    return figure


def who_holds_what(counts: dict[str, np.ndarray], class_names: list[str], noun: str = "images") -> Figure | None:
    """Each client's images by class, those of them with labels, and how many images of each class are labelled where.

    `counts` are those of `fedjax_ssl.data.class_counts`; {} makes no picture.
    """
    if not counts:
        return None
    clients, labelled, at_server = counts["clients"], counts["labelled"], counts["server"]
    place, held = np.arange(clients.shape[1]), client_sizes(counts).sum()
    heats = {f"{noun.capitalize()} at each client": clients, "Those of them that have labels": labelled}
    if not labelled.any():
        heats.popitem()
    layout, size = [[title, "bars"] for title in heats], (WIDE[0], (0.35 + 0.65 * len(heats)) * WIDE[1])
    figure, axes = subplots(figsize=size, mosaic=layout, width_ratios=(3, 2))
    for title, numbers in heats.items():
        _client_heat(figure, axes[title], numbers, title, class_names, noun)
    bars, left = axes["bars"], np.zeros(len(place), int)
    bars.barh(place - 0.2, counts["train"], 0.4, color=COLOURS[4], label="the training set")
    for label, numbers, colour in (
        ("at clients, with labels", labelled.sum(axis=0), COLOURS[1]),
        ("at clients, without labels", (clients - labelled).sum(axis=0), COLOURS[0]),
        ("at the server, with labels", at_server, COLOURS[3]),
        ("held out for validation", counts["validation"], COLOURS[2]),
    ):
        if numbers.any():
            bars.barh(place + 0.2, numbers, 0.4, left=left, color=colour, label=label)
            left += numbers
    bars.invert_yaxis()
    labels = f"labels: {labelled.sum():,} at clients, {at_server.sum():,} at the server"
    bars.set(xlabel=noun, title=f"{held:,} {noun} at {len(clients):,} clients,\n{labels}")
    label_classes(bars.yaxis, class_names)
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower center", ncols=3)
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


def to_plane(embeddings: np.ndarray) -> np.ndarray:
    """Positions of embeddings [n, D] in a plane: float [n, 2], by t-SNE, as in FedAnchor's Figure 5; deterministic.

    Distances are Euclidean between unit vectors: their order is that of the cosines that give pseudo-labels.
    """
    from sklearn.manifold import TSNE  # takes a second to import
    from threadpoolctl import threadpool_limits

    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(lengths > 0, lengths, 1)
    # Too few points for neighbourhoods, or fewer than two directions, as from a network with only dead units.
    if len(unit) < 4 or unit.shape[1] < 2 or np.max(np.ptp(unit, axis=0)) < 1e-6:
        return np.pad(unit[:, :2], ((0, 0), (0, max(0, 2 - unit.shape[1]))))
    perplexity = min(30.0, (len(unit) - 1) / 3)
    # One thread: with so few points, several threads wait for each other, up to a minute if other runs use the cores.
    with threadpool_limits(1):
        return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)


def latent_space(
    planes: dict[int, tuple[np.ndarray, np.ndarray]], class_names: list[str], sets: Mapping[int, str] = {}
) -> Figure:
    """The latent space, with class centroids as stars.

    `planes`: round -> (positions in the plane [n, 2], labels [n]). `sets`: round -> the set whose images are shown, for
    the titles that must name it.
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
    matrix = np.bincount(labels * num_classes + predictions, minlength=num_classes**2).reshape(num_classes, -1)
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


def client_accuracy(accuracies: Mapping[str, list[np.ndarray]], on: str = "each client's mix") -> Figure | None:
    """Accuracies of clients from the worst to the best, one curve for each model; the worst tenth is shaded.

    `accuracies`: name of a model -> its accuracy on each client's images, float [K], for each seed; NaN for clients
    without images. `on` names these images.
    """
    place, drawn = np.linspace(0, 100, 201), dict[str, Curve]()
    for name, seeds in accuracies.items():
        present = [np.sort(of_seed[np.isfinite(of_seed)]) for of_seed in seeds if np.isfinite(of_seed).any()]
        # Client k of K stands for the share from k to k + 1.
        found = [100 * of[np.minimum((place / 100 * len(of)).astype(int), len(of) - 1)] for of in present]
        drawn[name] = (place, np.stack(found)) if found else None
    figure = curves(drawn, f"accuracy on {on} (%)", 100, "clients, from the worst on (%)", legend=len(accuracies) > 1)
    if figure is not None:
        figure.axes[0].axvspan(0, 10, color=INK, alpha=0.08, linewidth=0)
        figure.axes[0].set_xlim(0, 100)
    return figure


def draw_band(axes: Axes, x: np.ndarray, values: np.ndarray, label: str, number: int) -> None:
    """Draws curve `number` (0, 1, ...): the mean of values [seeds, rounds], and their range as a band.

    A line leads over rounds without a value, such as those without a test.
    """
    style, some = curve_style(number), np.isfinite(values).any(axis=0)
    x, values = x[some], values[:, some]
    alone: dict[str, Any] = {"marker": "o", "markersize": 4} if values.shape[1] == 1 else {}  # one round makes no line
    if label.startswith("_"):  # matplotlib would leave it out of the legend
        label = f"\u200b{label}"
    present = np.ma.masked_invalid(values)  # a round may lack a value for some seeds
    axes.plot(x, present.mean(axis=0), label=label, **style, **alone)
    if len(values) > 1:
        axes.fill_between(x, present.min(axis=0), present.max(axis=0), color=style["color"], alpha=0.18, linewidth=0)


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


def label_classes(axis: Any, class_names: list[str], rotate: bool = False) -> None:
    """Sets a tick for every class, or for some of them if there are many."""
    if len(class_names) <= MANY:
        turned = {"rotation": 60, "ha": "right"} if rotate and max(map(len, class_names)) > 2 else {}
        axis.set_ticks(range(len(class_names)), class_names, **turned)
        axis.set_tick_params(length=0)
