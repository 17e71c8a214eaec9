"""FedAnchor on a table, labels at the server: scikit-learn's digits as rows of 64 numbers, no download.

    python launch.py --config=configs/quickstart_table.py

20 clients of 69 rows each, non-IID (Dirichlet alpha 0.5), 50 labelled rows at the server, 5 clients a round.
Another method: --config=configs/quickstart_table.py:semifl,strong. Labels alone: :server_only.
For your own CSV file see docs/how_to/own_data.md.
At our scale FedAnchor minus the labels alone is +7.09 ± 4.05 (board leaderboard/table_server).
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    config.num_rounds = 30
    config.num_clients = 20
    config.clients_per_round = 5
    config.data.source = "digits_table"
    config.data.server_labels = 50
    config.data.alpha = 0.5
    config.model.name = "mlp"
    config.model.normalisation = "static"
    config.server.augmentation = "weak"
    config.server.epochs = 5
    return apply_arguments(config, arguments)
