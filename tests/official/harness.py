"""Runs a method's real rounds on a toy federation and compares them with a float64 reference.

How a comparison is written:

    problem = make_problem("fixmatch", **{"client.batch_size": 4})   # any fields; views are `mirrored` and `rolled`
    data = federation(clients=[[0, 1, -1, ...], ...], at_server=[])    # three clients of unequal size; -1: hidden label
    run = train(problem, data, rounds=3)                             # init and rounds, compiled, by `make_round`
    model = reference.in_float64(run.states[0].model)                # both begin with the same numbers
    for job in run.rounds[0].jobs[0]: ...                            # what a phase prepared: which rows, in which order
    agree("fixmatch", "three rounds", run, model, code="kekmodel/FixMatch-pytorch@10db592 train.py")

Random draws are not compared. The views draw nothing. The reference takes the order of a client's examples from the run
(`Job.batches`), and the order of the server's examples from the images that its views saw (`Round.seen`).
"""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.data import FederatedData
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.round import make_round
from fedjax_ssl.methods import METHODS
from fedjax_ssl.ops.sgd import Model
from fedjax_ssl.run import experiment
from fedjax_ssl.run.validation import validate
from tests.helpers.contract import Rounds, check_hidden_labels, check_labels_elsewhere, check_training
from tests.helpers.federations import one_after_the_other, put_federation
from tests.official import reference

SIDE, CLASSES = 4, 3
MOST = 1e-5  # the largest allowed difference of a parameter: ten times float32's rounding in these rounds
RESULTS = "FEDJAX_SSL_OFFICIAL_RESULTS"  # environment variable: the folder for results of `agree`
FACTS = {"num_classes": CLASSES, "image_shape": (SIDE, SIDE, 1), "mean": (0.5,), "std": (0.25,), "flip": False}


def itself(images: Any) -> Any:
    """Returns images [B, H, W, C] unchanged."""
    return images


def mirrored(images: Any) -> Any:
    """The weak view: mirrors images. Takes NumPy's and JAX's arrays, like all views here."""
    return images[:, :, ::-1]


def rolled(images: Any) -> Any:
    """The strong view: moves the last row of pixels to the top."""
    return images[:, np.array([SIDE - 1, *range(SIDE - 1)])]


def make_problem(arguments: str, weak: Callable = mirrored, strong: Callable = rolled, **fields: Any) -> Problem:
    """The problem of a method's run: three clients, all in each round, two local epochs, plain SGD with all its
    options.

    Args:
        arguments: a method and its variants, as for a config file.
        weak, strong: views, images [B, H, W, C] -> images; also the first and the second of `problem.views`.
        fields: any configuration fields by dotted names.
    """
    entry = METHODS[arguments.split(",")[0]]
    config = base_config()
    config.data.labels = entry.settings[0]
    config = apply_arguments(config, arguments)
    config.update_from_flattened_dict({
        "num_clients": 3, "clients_per_round": 3, "num_rounds": 3, "eval_batch_size": 8,
        "model.name": f"{pathlib.Path(__file__).parent / 'two_layers.py'}:TwoLayers",
        "model.normalisation": "running",
        "client.epochs": 2, "client.batch_size": 4, "client.learning_rate": 0.05, "client.momentum": 0.9,
        "client.weight_decay": 0.01, "client.nesterov": True, "server.batch_size": 4, "server.learning_rate": 0.05,
        **fields,
    })  # fmt: skip
    if config.data.labels != "server" and config.model.normalisation == "static":
        config.model.statistics = "cohort"  # the server has no images
    validate(config)
    of_key = [lambda key, images, view=view: view(images) for view in (weak, strong)]
    return experiment.make_problem(config, FACTS, lacks_labels=False)._replace(
        weak=of_key[0], strong=of_key[1], views=tuple(of_key)
    )


def federation(clients: list[list[int]], at_server: Sequence[int] = (), seed: int = 0) -> FederatedData:
    """Random images with the given labels.

    Args:
        clients: for each of three clients the labels of its images, -1 for a hidden label.
        at_server: labels of the server's images, which are the table's first rows.
        seed: of the images.
    """
    labels = [*(at_server or [-1]), *(label for client in clients for label in client)]
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), SIDE, SIDE, 1)).astype(np.uint8)
    rows = one_after_the_other(clients, max(len(at_server), 1))
    return put_federation(images, labels, rows, range(len(at_server)), seed=seed)


class Job(NamedTuple):
    """What a phase prepared for one client, in NumPy.

    Attributes:
        client: its number.
        num_steps: local steps.
        work: what its steps read, a pytree.
        report: the labels made, or None.
    """

    client: int
    num_steps: int
    work: Any
    report: Any

    def batches(self, batch_size: int, deck: Any = None) -> list[np.ndarray]:
        """The rows of the image table in each local step, with short last batches; of unlabelled ones if any."""
        decks = self.work.decks if deck is None else {}
        deck = decks.get("unlabelled", decks.get("labelled")) if deck is None else deck
        batches = []
        for order in deck.order:
            rows = deck.rows[order[: int(deck.size)]]
            batches += [rows[first : first + batch_size] for first in range(0, len(rows), batch_size)]
        return batches


class Round(NamedTuple):
    """What was observed of a round (or of the initialisation, which has no jobs).

    Attributes:
        jobs: for each phase, a list of `Job`s in the order of the draw, turn after turn.
        seen: (view, rows) of every call of a view, in order: 'weak' or 'strong', and int [B], rows of the image table;
            -1 for an image outside it, such as a mixture. Includes padded rows.
    """

    jobs: list[list[Job]]
    seen: list[tuple[str, np.ndarray]]


class Run(NamedTuple):
    """A run of a few rounds.

    Attributes:
        problem, data: as given.
        fresh: the model before the server's pre-training.
        states: before the first round, and after each.
        metrics: of each round.
        init: what was observed of the initialisation.
        rounds: what was observed of each round.
        compiled: the programs, and what they returned.
    """

    problem: Problem
    data: FederatedData
    fresh: Model
    states: list[State]
    metrics: list[dict[str, np.ndarray]]
    init: Round
    rounds: list[Round]
    compiled: Rounds


def train(
    problem: Problem,
    data: FederatedData,
    rounds: int,
    method: Method | None = None,
    rests: Sequence[int] | None = None,
) -> Run:
    """Initialises and trains with the real, compiled `make_round` in one lane; records jobs and views.

    Args:
        problem, data: the run's.
        rounds: their number.
        method: instead of the problem's.
        rests: see `Rounds`; by default as the registry says.
    """
    rows_of = {image.tobytes(): row for row, image in enumerate(np.asarray(data.inputs))}
    calls, jobs, fresh = [], {}, []

    def note(name, images):
        images = np.asarray(images)
        calls.append((name, np.array([rows_of.get(image.astype(np.uint8).tobytes(), -1) for image in images])))

    def watched(name, view):
        def call(key, images):
            jax.debug.callback(note, name, images)
            return view(key, images)

        return call

    def watched_phase(number, phase):
        def keep(clients, num_steps, work, report):
            work, report = jax.tree.map(np.asarray, (work, report))
            rows = [jax.tree.map(lambda leaf, row=row: leaf[row], (work, report)) for row in range(len(clients))]
            of_turn = [Job(int(c), int(n), *of_row) for c, n, of_row in zip(clients, num_steps, rows)]
            jobs.setdefault(number, []).extend(of_turn)

        def prepare(broadcast, data, cohort, previous):
            laid_out = phase.prepare(broadcast, data, cohort, previous)
            work = jax.tree.map(_without_key, laid_out.work)
            report = None if cohort.labels is None else cohort.labels.report
            jax.debug.callback(keep, cohort.clients, laid_out.num_steps, work, report)
            return laid_out

        return phase._replace(prepare=prepare)

    class Network(type(problem.network)):
        def init(self, key):
            model = super().init(key)
            jax.debug.callback(lambda *leaves: fresh.append(Model(*leaves)), *model)
            return model

    spied = problem._replace(
        network=Network(*problem.network),
        weak=watched("weak", problem.weak),
        strong=watched("strong", problem.strong),
        views=tuple(watched(name, view) for name, view in zip(("weak", "strong"), problem.views)),
    )
    method = METHODS[problem.config.method].factory(spied) if method is None else method
    method = method._replace(phases=tuple(watched_phase(*entry) for entry in enumerate(method.phases)))

    def seen() -> Round:
        jax.effects_barrier()
        noted = Round([jobs[number] for number in sorted(jobs)], list(calls))
        jobs.clear(), calls.clear()
        return noted

    init = jax.jit(lambda data: experiment.first_state(spied, method, data))
    states, results, noted = [init(data)], [], [seen()]
    hidden_labels = jnp.maximum(data.visible_labels, 0)
    arguments = states[0], data, hidden_labels
    round_fn = jax.jit(make_round(spied, method, lanes=1)).lower(*arguments).compile()
    for _ in range(rounds):
        state, result = round_fn(states[-1], data, hidden_labels)
        states.append(state)
        results.append(jax.device_get(result))
        noted.append(seen())
    metrics = [result.metrics for result in results]
    rests = METHODS[problem.config.method].rests if rests is None else rests
    compiled = Rounds(spied, method, init, round_fn, data, hidden_labels, states, results, rests)
    return Run(problem, data, fresh[0], states, metrics, noted[0], noted[1:], compiled)


def check_contract(rounds: Rounds) -> None:
    """What every method must do; with labels at clients also if one client has labels alone, one none and one a few."""
    check_training(rounds)
    check_hidden_labels(rounds)
    if "profile" in METHODS[rounds.problem.config.method].settings and not len(rounds.data.server_index):
        everything, nothing, few = (int(size) for size in rounds.data.client_size)
        labels = [[row % CLASSES for row in range(everything)], [-1] * nothing, [0, *[-1] * (few - 1)]]
        check_labels_elsewhere(rounds, federation(labels))


def _without_key(leaf: jax.Array) -> jax.Array:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def agree(method: str, what: str, run: Run, expected: Any, *, code: str, found: Any = None, most: float = MOST) -> None:
    """Checks a run's last model against the reference, and its rounds against what every method must do.

    Records the largest difference for the docs' table.

    Args:
        method: its name in the registry.
        what: what was compared, in a few words.
        run: of the library.
        expected: the reference's model: a dict of NumPy arrays with 'params' and 'batch_stats', or with 'params' alone
            to compare only these.
        code: of the official code, 'OWNER/REPOSITORY@COMMIT: files'; or why there is none, after 'no code: '.
        found: a model to compare instead of the global one.
        most: the largest accepted difference; a test with more than 1e-5 must show why.
    """
    found = run.states[-1].model if found is None else found
    found, first = reference.in_float64(found), reference.in_float64(run.states[0].model)
    found = {kind: found[kind] for kind in expected}
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    params, start = expected["params"], {name: first["params"].get(name) for name in expected["params"]}
    moved = max(_largest(params[name], start[name]) for name in params if start[name] is not None)
    difference = _largest(found["params"], params)
    of_statistics = _largest(found.get("batch_stats", {}), expected.get("batch_stats", {}))
    assert moved > 1000 * most, "nothing was trained"
    assert difference <= most, f"parameters that moved by {moved:.3g} differ by {difference:.3g}"
    assert of_statistics <= 10 * most, f"statistics differ by {of_statistics:.3g}"
    if folder := os.environ.get(RESULTS):
        line = {"method": method, "what": what, "difference": difference, "moved": moved, "code": code}
        name = f"{method} {what}".replace(" ", "_").replace("/", "_")
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(folder) / f"{name}.json").write_text(json.dumps(line) + "\n")
    check_contract(run.compiled)


def _largest(tree: Any, other: Any) -> float:
    differences = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b), initial=0.0)), tree, other)
    return max(jax.tree.leaves(differences), default=0.0)
