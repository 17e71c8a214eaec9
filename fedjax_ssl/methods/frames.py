"""The frame that FedAvg's descendants share: clients train, their models are averaged, the server trains on anchors.

A method with one head gives its clients' phases and gets the rest. Replace a stage with
`alternating(...)._replace(...)`.
"""

from collections.abc import Callable

from fedjax_ssl.client import global_model, own_optimizers
from fedjax_ssl.engine import CLASSIFIER, Method, Phase, Problem
from fedjax_ssl.server import (
    CLASSIFICATION,
    Aggregation,
    fedavg,
    make_statistics,
    own_optimizer,
    pretrained_classifier,
    train_classifier,
)


def alternating(
    problem: Problem,
    phases: tuple[Phase, ...],
    own: Callable | None = None,
    *,
    parts: tuple[str, ...] = CLASSIFIER,
    aggregation: Aggregation | None = None,
) -> Method:
    """Alternate training (SemiFL, section 3.1): the clients' models are averaged, then the server trains on anchors.

    Where the server has no anchors (`data.labels`) it neither pre-trains nor trains, and this is FedAvg.

    Args:
        problem: the run. `server.epochs = 0` skips the server's training, `server.pretrain_epochs = 0` the
            pre-training.
        phases: what a client does with the global model (`Broadcast`); () if no client takes part.
        own: (data, model) -> the method's entries of the clients' memory, leaves [K, ...].
        parts: of the model that clients train and upload.
        aggregation: of these parts; None: `config.aggregation`'s chain.

    Returns:
        The Method.
    """
    config, aggregation = problem.config, aggregation or fedavg(problem, parts=parts)

    def init(data, key):
        state = pretrained_classifier(problem, data, key)
        model = state.model
        optimizers = own_optimizers(problem, model, parts) if phases else {}
        return state._replace(
            server={
                **aggregation.init(model.params),
                **own_optimizer(config.server, model, CLASSIFIER, CLASSIFICATION),
            },
            clients={**optimizers, **(own(data, model) if own else {})},
        )

    return Method(
        init=init,
        broadcast=lambda state, data, key: global_model(problem, state),
        phases=phases,
        aggregate=aggregation.aggregate,
        server_after=lambda state, data, key: train_classifier(problem, state, data, key),
        # Without clients only the server has images.
        statistics=make_statistics(problem.network, config.model.statistics if phases else "server"),
    )
