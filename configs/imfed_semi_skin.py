"""imFed-Semi on ISIC 2018's skin lesions, labels at the server (MICCAI 2022, arXiv 2206.13079).

    python launch.py --config=configs/imfed_semi_skin.py
    python launch.py --config=configs/imfed_semi_skin.py:imfed_semi,code

The setting of the public code, med-air/imFedSemi: seven classes of 224 pixels, ten clients without labels, all in every
round, 200 rounds of one epoch; the first 31, the server's alone, are its pre-training here. examples/ham10000.py makes
ham10000.npz. The code has DenseNet-121 and its own imbalanced division of the images; here it is ResNet-18 with the
ImageNet stem, and Dirichlet alpha 0.8. Ours are the number of the server's images, and its SGD in place of Adam at
2e-4 and 3e-4. The published figures are not here, since only the paper's abstract was available.
At our scale imFed-Semi minus the labels alone is +1.51 ± 2.90 (board leaderboard/digits_server).
Arguments: alpha=, server_labels=, a backbone, other methods, the variants of fedjax_ssl/methods/imfed_semi.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "imfed_semi")
    config.update_from_flattened_dict({
        "num_clients": 10,
        "clients_per_round": 10,
        "num_rounds": 169,
        "eval_batch_size": 64,
        "eval_measures": ("balanced_accuracy", "precision", "auc"),
        "aggregation.weights": "uniform",
        "data.source": "npz",
        "data.path": "ham10000.npz",
        "data.server_labels": 800,
        "data.alpha": 0.8,
        "data.flip": True,
        "model.name": "resnet18_imagenet",
        "client.epochs": 1,
        "client.batch_size": 24,
        "client.optimizer": "adam",
        "client.learning_rate": 2e-4,
        "client.clip_norm": 0.0,
        "server.batch_size": 24,
        "server.epochs": 1,
        "server.pretrain_epochs": 31,
        "server.clip_norm": 0.0,
    })  # fmt: skip
    return apply_arguments(config, arguments)
