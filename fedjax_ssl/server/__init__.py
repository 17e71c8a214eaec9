"""The server's side: training, aggregation, statistics. Uses the engine's types; does not import client code."""

from fedjax_ssl.server.aggregation import (
    Aggregation,
    Flow,
    Given,
    Link,
    by_role,
    chain,
    fedavg,
    group_members,
    half_told,
    mean,
    optimizer,
    own_weights,
    screen,
    weights,
    weights_told,
    with_server_model,
)
from fedjax_ssl.server.eligible import labelled_clients, only_eligible
from fedjax_ssl.server.probe import with_probe
from fedjax_ssl.server.statistics import make_statistics
from fedjax_ssl.server.training import (
    CLASSIFICATION,
    SERVER_MODEL,
    MakeServerLoss,
    ServerPlan,
    own_optimizer,
    pretrained_classifier,
    server_lambda,
    supervised_loss,
    supervised_mixup_loss,
    train_classifier,
    train_on_server_labels,
    train_server_model,
)
