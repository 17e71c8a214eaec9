"""The frame that FedAvg's descendants share: clients train, their models are averaged, the server trains on anchors.

A method of one head gives its clients' phases, and gets the rest; what it does otherwise it replaces
(`alternating(...)._replace(...)`).
"""

from collections.abc import Callable

from fedjax_ssl.client.local_sgd import global_model, own_optimizers
from fedjax_ssl.engine.interface import CLASSIFIER, Method, Phase, Problem
from fedjax_ssl.server.aggregation import make_aggregation
from fedjax_ssl.server.statistics import make_statistics
from fedjax_ssl.server.training import CLASSIFICATION, own_optimizer, pretrained_classifier, train_classifier


def alternating(problem: Problem, phases: tuple[Phase, ...], own_states: Callable | None = None) -> Method:
    """Alternate training (SemiFL, section 3.1): the clients' models are averaged, then the server trains on anchors.

    Args:
        problem: the run. `server.epochs = 0` leaves the server's training out, `server.pretrain_epochs = 0` the
            pre-training.
        phases: what a client does with the global model (`GlobalModel` comes down); () for nobody.
        own_states: data -> what else each client keeps for itself, leaves [K, ...].

    Returns:
        The Method.
    """
    aggregation = make_aggregation(problem, CLASSIFIER)

    def init(data, key):
        state = pretrained_classifier(problem, data, key)
        return state._replace(
            server={
                **aggregation.init(state.model.params),
                **own_optimizer(problem.config.server, state.model.params, CLASSIFIER, CLASSIFICATION),
            },
            clients={
                **(own_optimizers(problem, state.model.params, CLASSIFIER) if phases else {}),
                **(own_states(data) if own_states else {}),
            },
        )

    return Method(
        init=init,
        broadcast=lambda state, data: global_model(problem, state),
        phases=phases,
        aggregate=aggregation.aggregate,
        server_after=lambda state, data, key: train_classifier(problem, state, data, key),
        # Without clients there are no images but the server's.
        statistics=make_statistics(problem.network, problem.config.model.statistics if phases else "server"),
    )
