"""FedIRM on intracranial haemorrhage (RSNA 2019), two of ten clients have labels (MICCAI 2021, arXiv 2106.08600).

    python launch.py --config=configs/fedirm_rsna.py --config.data.path=rsna.npz
    python launch.py --config=configs/fedirm_rsna.py:fedirm,consistency --config.data.path=rsna.npz

The setting of the public code, liuquande/FedIRM: five classes of CT slices of 224 pixels, 17,503 images for training,
Adam, 200 rounds of one epoch with all clients, the first 21 with the labelled ones alone. The code has DenseNet-121;
here it is ResNet-18 with the ImageNet stem. docs/how_to/own_data.md says what the npz file holds. The published figures
are not here, since only the paper's abstract was available.
At our scale FedIRM minus the labels alone is +16.77 ± 19.96 (board leaderboard/digits_some_clients).
Arguments: a backbone, other methods, the variants of fedjax_ssl/methods/fedirm.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedirm,code")
    config.update_from_flattened_dict({
        "num_clients": 10,
        "clients_per_round": 10,
        "num_rounds": 200,
        "eval_batch_size": 64,
        "data.source": "npz",
        "data.path": "rsna.npz",
        "data.partition": "iid",
        "data.labelled_clients": 2,
        "data.flip": True,
        "model.name": "resnet18_imagenet",
        "client.epochs": 1,
        "client.batch_size": 48,
        "client.optimizer": "adam",
        "client.learning_rate": 2e-4,
        "client.clip_norm": 0.0,
    })  # fmt: skip
    return apply_arguments(config, arguments)
