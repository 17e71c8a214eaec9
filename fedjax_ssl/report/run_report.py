"""The report of one run: WORKDIR/report.html, and its pictures in WORKDIR/figures/."""

import datetime
import os
import pathlib

import numpy as np

from fedjax_ssl.base.fields import flatten
from fedjax_ssl.base.files import expanded, replace_file, writing
from fedjax_ssl.base.imports import name_of
from fedjax_ssl.records.clients import OVER_CLIENTS, TESTED, over_clients
from fedjax_ssl.records.groups import Group
from fedjax_ssl.records.origin import read_starts
from fedjax_ssl.records.runs import RunRecords, read_run
from fedjax_ssl.records.workdir import FIGURES, MODEL_CARD, REPORT
from fedjax_ssl.report import figures, page, style
from fedjax_ssl.report.conditions import conditions
from fedjax_ssl.report.model_card import model_card


def write_report(workdir: str | os.PathLike[str], size: str = style.SCREEN) -> pathlib.Path:
    """Writes the report of a run: report.html, figures/*.png and *.svg, and MODEL_CARD.md; returns the page's path.

    The page says if the run is not finished. Pictures have one of `style.SIZES`; the sizes for papers also give
    figures/*.pdf. Raises a UserError if there is no run, it has not finished a round, or the folder cannot be written.
    """
    run = read_run(expanded(workdir))
    pictures = page.Pictures(run.folder / FIGURES)
    path = run.folder / REPORT
    with writing(path), style.styled(size):
        for draw in (_draw_rounds, _draw_data, _draw_snapshots, _draw_clients, _draw_costs):
            draw(run, pictures)
        replace_file(run.folder / MODEL_CARD, model_card(run))
    page.write_page(path, title_of(run), lead_of(run), _sections(run, pictures))
    return path


def _draw_rounds(run: RunRecords, pictures: page.Pictures) -> None:
    """What is measured each round: accuracy, losses, pseudo-labels."""
    of, add = run.measured, pictures.add
    caption = f"Accuracy of the classification head on the {of} set after each round with a test."
    add("Accuracy", f"{of}_accuracy", figures.accuracy(_alone(run), of), caption)
    caption = f"What else is measured on the {of} set; most are means over classes, not {run.noun}."
    add("Accuracy", "measures", figures.measures(run), caption)
    caption = f"Losses, means over a round; the {of} loss is cross-entropy."
    add("Accuracy", "losses", figures.losses(run), caption)
    caption = (
        "How many of the pseudo-labels of a round's cohort are right, by each way of labelling, and of those that "
        "clients train on."
    )
    add("Pseudo-labels", "pseudo_labels", figures.pseudo_labels(run), caption)
    caption = "Examples that a client of the round's cohort trains on: those whose label passes the threshold."
    add("Pseudo-labels", "qualified", figures.qualified(_alone(run)), caption)
    caption = (
        "The scores that labels are made by: how far the best class is ahead of the second, and, with an anchor head, "
        "the cosine of an embedding with the direction that all anchors share. The nearer that is to 1, the less a "
        "cosine says about the class."
    )
    add("Pseudo-labels", "scores", figures.scores(run), caption)


def _draw_data(run: RunRecords, pictures: page.Pictures) -> None:
    counts, noun, without = run.class_counts(), run.noun, ""
    if counts and counts["labelled"].any():
        number, clients = int(np.sum(counts["labelled"].sum(axis=1) == 0)), len(counts["labelled"])
        without = f" {number} of {clients} clients {'has' if number == 1 else 'have'} no label."
    kinds = {"unlabelled": "have no label in the data", "unknown": "are of classes that the model does not know"}
    beside = "".join(f" {counts[kind].sum():,} more {words}." for kind, words in kinds.items() if kind in counts)
    pictures.add(
        "Data",
        "who_holds_what",
        figures.who_holds_what(counts, run.class_names(), noun),
        f"Who holds what: {noun} of each class at each client, those of them that have labels, if any have, and the "
        f"sums over clients. Clients may hold fewer {noun} than there are where their number is limited. Grey cells "
        f"have none.{without}{beside}",
        wide=True,
    )


def _draw_snapshots(run: RunRecords, pictures: page.Pictures) -> None:
    """The latent space, and what the last snapshot says of each class."""
    snapshots, names, noun = run.snapshots(), run.class_names(), run.noun
    if not snapshots or not names:
        return
    end = max(snapshots)
    last = snapshots[end]
    planes = {n: (figures.to_plane(taken["embeddings"]), taken["embedding_labels"]) for n, taken in snapshots.items()}
    sets, of = {when: str(taken["of"]) for when, taken in snapshots.items()}, str(last["of"])
    sizes = {str(taken["of"]): len(taken["embeddings"]) for taken in snapshots.values()}
    pictured = " or ".join(f"{number:,} {name} {noun}" for name, number in sizes.items())
    figure = figures.latent_space(planes, names, sets if len(sizes) > 1 else {})
    caption = f"The latent space by t-SNE: {pictured}, coloured by class; a star is the middle of its class."
    pictures.add("Latent space", "latent_space", figure, caption, wide=len(planes) > 1)
    shown = (last["labels"], last["predictions"], names)
    caption = f"{of.capitalize()} {noun} after round {end}, percent of a class."
    pictures.add("Accuracy", "confusion", figures.confusion(*shown), caption)
    caption = f"Accuracy by class after round {end}, on the {of} set."
    pictures.add("Accuracy", "class_accuracy", figures.class_accuracy(*shown, of), caption)


def _draw_clients(run: RunRecords, pictures: page.Pictures) -> None:
    of_mix, tests = run.client_accuracy(), {TESTED[model]: found for model, found in run.client_tests().items()}
    for name, of_models, on, more in (
        ("client_accuracy", {} if of_mix is None else {"last model": of_mix}, "each client's mix", " of classes"),
        ("client_tests", tests, f"each client's own test {run.noun}", ", which nobody trained on"),
    ):
        figure = figures.client_accuracy({model: [values] for model, values in of_models.items()}, on)
        caption = f"Accuracy on {on}{more}, from the lowest client to the highest; the lowest tenth is shaded; "
        caption += "; ".join(_of_clients(model, values) for model, values in of_models.items())
        pictures.add("Accuracy", name, figure, f"{caption}.")
    for name, values in run.by_client().items():
        words = name.replace("_", " ")
        figure = figures.by_client(run.values("round"), values, words)
        pictures.add("Clients", name, figure, f"The {words} of each client, in the rounds in which it has one.")


def _draw_costs(run: RunRecords, pictures: page.Pictures) -> None:
    travelled, of = "What travels between server and clients.", run.measured
    pictures.add("Communication", "bytes", figures.bytes_over_rounds(run), travelled, wide=True)
    caption = f"{of.capitalize()} accuracy over everything that has travelled until then."
    pictures.add("Communication", "accuracy_over_bytes", figures.accuracy_over_bytes(_alone(run), of), caption)
    caption = "Where the time went. `python launch.py profile` shows the stages of a round."
    pictures.add("Time", "time", figures.time_spent(run), caption)


def _alone(run: RunRecords) -> list[Group]:
    return [Group(name_of(run.config["method"]), [run])]


def _of_clients(model: str, accuracies: np.ndarray) -> str:
    """A model's figures over clients, in words."""
    shares = {OVER_CLIENTS[name]: share for name, share in over_clients(accuracies).items() if share is not None}
    return f"{model}: " + ", ".join(f"{words} {100 * share:.2f} %" for words, share in shares.items())


def _sections(run: RunRecords, pictures: page.Pictures) -> list[page.Part]:
    starts = sum("compile_seconds" in line and "seconds" not in line for line in run.timings)
    return [
        *({"note": line} for line in _notes(run)),
        {"tiles": _main_figures(run)},
        *map(pictures.section, ("Accuracy", "Pseudo-labels", "Clients", "Latent space", "Data", "Communication")),
        pictures.section("Time", {"text": starts > 1 and f"The run was started {starts} times."}),
        page.section("Where it comes from", *_origin(run)),
        page.section("Configuration", *_configuration(run)),
    ]


def _main_figures(run: RunRecords) -> dict[str, str]:
    (best, best_round), tested = run.best(), run.tested("test_accuracy")
    held_out = {"validation accuracy": f"{100 * run.accuracy()[-1]:.2f} %"} if run.measured == "validation" else {}
    number = run.dataset().get("num_test")
    return {
        "test accuracy": "-" if tested is None else f"{100 * tested:.2f} %{f' of {number:,}' if number else ''}",
        **{f"test {words}": share for words, share in run.tested_measures().items()},
        **held_out,
        "best validation accuracy" if held_out else "best": f"{100 * best:.2f} % (round {best_round})",
        "rounds": f"{run.metrics[-1]['round']} of {run.config['num_rounds']}",
        **{way: f"{run.values(f'bytes_{way}').sum() / 1e6:,.1f} MB" for way in ("down", "up")},
        "time in rounds": str(datetime.timedelta(seconds=round(run.seconds()))),
    }


def _notes(run: RunRecords) -> list[str]:
    """What a reader must know before the figures."""
    notes = [f"A file of this run is damaged: {line}." for line in (*run.damages, *run.unreadable())]
    if run.measured == "validation":
        notes.append(
            f"Rounds are measured on {run.config['data']['validation']:,} validation {run.noun}, which were taken "
            "from the training set before it was divided. The test set is for the last round's model."
        )
    if not run.is_finished:
        notes.append(f"This run is not finished: it stands at {run.standing()}, and is shown that far.")
    if run.why_ended():
        notes.append(f"The run ended in {run.standing()}: {run.why_ended()}.")
    if run.labels_revealed:
        notes.append("An upper bound: the clients' labels were revealed to the method.")
    return [*notes, " ".join(conditions(run))]


def _origin(run: RunRecords) -> list[page.Part]:
    """The newest start's code, command and machine."""
    rows = [list(pair) for start in read_starts(run.folder)[-1:] for pair in start.facts().items()]
    return [{"table": rows and page.Table(["", ""], rows, long=(1,))}]


def _configuration(run: RunRecords) -> list[page.Part]:
    """All fields that matter to the method; those that have the library's defaults are folded."""
    flat, flat_defaults = flatten(run.config), flatten(run.about["defaults"])
    of_others = run.other_sections
    fields = [name for name in flat if name.partition(".")[0] not in of_others]
    rows = [[name, str(flat[name]), str(flat_defaults.get(name, "-"))] for name in fields]
    changed, same = [row for row in rows if row[1] != row[2]], [row[:2] for row in rows if row[1] == row[2]]
    summary = run.summary or {}
    listed = ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    return [
        {"table": changed and page.Table(["field", "value", "default"], changed, long=(1,))},
        {"folded": f"{len(same)} fields at their defaults", "table": page.Table(["field", "value"], same, long=(1,))},
        {"text": listed and f"{summary.get('device', '-')} ({summary.get('backend', '-')}); {listed}."},
    ]


def title_of(run: RunRecords) -> str:
    """The page's title."""
    data = run.dataset().get("name", run.config["data"]["source"])
    return f"{name_of(run.config['method'])} on {data}, seed {run.config['seed']}"


def lead_of(run: RunRecords) -> str:
    """The line below the title."""
    config = run.config
    where = f"{config['clients_per_round']} of {config['num_clients']} clients a round"
    if run.is_of_server_alone:
        where = "trained at the server alone"
    return f"{config['model']['name']}; {where}, {run.who_has_labels()}; {run.folder}"
