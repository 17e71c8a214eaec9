"""Orchestra on CIFAR-10 (ICML 2022, arXiv 2205.11506), and other methods in the same setting.

    python launch.py --config=configs/orchestra_cifar10.py
    python launch.py --config=configs/orchestra_cifar10.py --config.probe.epochs=50

ResNet-18, 100 clients by Dir 0.1 of which 50 take part, one round that clusters and 100 of ten local epochs without a
label. Test accuracy is that of a probe, fitted to the server's 500 labelled images; those are held by no client. The
paper's are of a linear classifier trained on the labels of all images, and of the whole network fine-tuned on 1 % and
10 % of them; none could be read.
Arguments: server_labels=, alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/orchestra/.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "orchestra,paper")
    config.data.source = "cifar10"
    return apply_arguments(config, arguments)
