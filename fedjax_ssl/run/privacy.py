"""Computes a run's epsilon with Google's dp-accounting, and checks that a method keeps the guarantee."""

import hashlib
import logging
import pathlib
import secrets
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.engine.interface import Method, Problem, State
from fedjax_ssl.engine.tracing import trace_exchange
from fedjax_ssl.engine.untrusted.compression import remembers
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.records.sealed import NUM_BYTES, read_secret
from fedjax_ssl.run.dependence import reads, server_stages, some_received, trace
from fedjax_ssl.server.statistics import num_exchanging


class Accountant:
    """Epsilon after a number of rounds, for `privacy.delta`, by Renyi differential privacy.

    Neighbouring federations differ in one client. With Poisson cohorts, the client is present or absent. With cohorts
    of a fixed size, it is replaced by another one, so that the sum may differ by 2 S (Wang et al., AISTATS 2019).
    There is no guarantee towards anyone who knows the run's secret, from which noise and cohorts are drawn.
    """

    def __init__(self, config: Any):
        """Takes a valid config with `privacy.noise`. Raises a UserError without the package dp-accounting."""
        dp, rdp = _packages()
        noise, num_clients, cohort = config.privacy.noise, config.num_clients, config.clients_per_round
        if config.privacy.cohorts == "poisson":
            relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
            event = dp.PoissonSampledDpEvent(cohort / num_clients, dp.GaussianDpEvent(noise))
        else:
            relation = dp.NeighboringRelation.REPLACE_ONE
            event = dp.SampledWithoutReplacementDpEvent(num_clients, cohort, dp.GaussianDpEvent(noise / 2))
        one_round = rdp.RdpAccountant(neighboring_relation=relation)
        logger = logging.getLogger("absl")
        level = logger.level
        logger.setLevel(logging.ERROR)  # it warns of every order that it leaves out, which can only make epsilon larger
        try:
            one_round.compose(event)
        finally:
            logger.setLevel(level)
        self._epsilon = rdp.compute_epsilon
        self._orders, self._of_a_round, self.delta = one_round.orders, one_round.rdp, config.privacy.delta
        if config.privacy.cohorts == "fixed":  # drawing a cohort never weakens the guarantee, but that bound can
            of_all_clients = np.asarray(self._orders) / (2 * (noise / 2) ** 2)
            self._of_a_round = np.minimum(self._of_a_round, of_all_clients)

    def epsilon(self, num_rounds: int) -> float:
        """Epsilon after `num_rounds` rounds."""
        return float(self._epsilon(self._orders, num_rounds * self._of_a_round, self.delta)[0])


def secret_of(config: Any, folder: pathlib.Path | None = None) -> bytes:
    """The secret from which a run draws its noise and cohorts, 32 bytes; b'' without `privacy.noise`.

    It is the operating system's randomness. With `privacy.reproducible` it follows from the seed. A run that is resumed
    keeps the secret in its `folder`. Raises a UserError if that cannot be read.
    """
    if not config.privacy.noise:
        return b""
    if config.privacy.reproducible:
        return hashlib.sha256(f"seed {config.seed}".encode()).digest()
    return secrets.token_bytes(NUM_BYTES) if folder is None else read_secret(folder)


# The fields of the federation's data that describe clients.
OF_CLIENTS = ("client_index", "client_size", "labelled_size", "given_labels")


def check_private(problem: Problem, method: Method, state: State, data: Any) -> None:
    """Raises a UserError, one line that says why, if anything leaves a client without noise."""
    if problem.config.privacy.noise:
        _packages()
        if found := next(_breaks(problem, method, state, data), None):
            raise UserError(found)


def _breaks(problem: Problem, method: Method, state: State, data: Any) -> Iterator[str]:
    """What breaks the guarantee; see `check_private` for the arguments."""
    config, options = problem.config, problem.config.aggregation
    name = f"privacy.noise with {config.method}"
    if not method.phases or config.data.centralised:
        yield "privacy.noise protects clients' updates, but here no client trains, or the server has their images"
    if not options.clip_norm:
        yield f"privacy.noise={config.privacy.noise} needs aggregation.clip_norm, the bound of an update"
    if options.mean != "mean" or options.norm_bound:
        yield "privacy.noise needs the sum of updates: set aggregation.mean='mean' and norm_bound=0"
    if config.availability.late and config.availability.late_weight:
        yield "privacy.noise covers one round's updates; set availability.late_weight=0, or late=0"
    if config.attack.kind == "little":
        yield "attack.kind='little' puts others' updates into an attacker's; the noise covers one client's"
    if remembers(config.compression):
        yield "privacy.noise clips away what error feedback adds; set compression.error_feedback=False"
    if method.select is not None or method.personal is not None or method.wire_bytes is not None:
        yield f"{name}: its server has a message for each client, or chooses clients"
    exchange = trace_exchange(problem, method, state, data)
    if exchange.upload.metadata:
        told = ", ".join(sorted(exchange.upload.metadata))
        yield f"{name}: its clients send {told} besides the model, without noise"
    if tree_bytes(exchange.upload.model.batch_stats):
        yield (
            f"{name}: running statistics travel without noise; set model.normalisation to 'group', or to 'static' with "
            "model.statistics='server'"
        )
    if num_exchanging(problem.network, config.model.statistics, config.clients_per_round, config.num_clients):
        yield (
            f"{name}: model.statistics={config.model.statistics!r} asks clients for statistics without noise; set "
            "model.statistics='server', or model.normalisation='group'"
        )
    upload = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), exchange.upload)
    received = jax.eval_shape(lambda upload: some_received(upload, None, 1), upload)
    forbidden = ("[0].clients", *(f"[1].{field}" for field in OF_CLIENTS))
    for stage, function in server_stages(problem, method).items():
        found = reads(trace(function, state, data, received, exchange.selection.clients))
        if any(path.startswith(forbidden) for path in found):
            yield f"{name}: its stage {stage} reads clients' data at the server, without noise"


def _packages() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise UserError("privacy.noise needs the package dp-accounting: pip install 'fedjax_ssl[privacy]'") from None
    return dp_accounting, rdp
