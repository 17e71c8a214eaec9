"""FedCD on HAM10000's skin lesions (AAAI 2024).

    python launch.py --config=configs/fedcd_ham10000.py:supervised --config.num_rounds=200 --workdir=runs/warm_up
    python launch.py --config=configs/fedcd_ham10000.py --config.init_from=runs/warm_up

Seven classes, 10,015 images; examples/ham10000.py makes ham10000.npz of them. As in the paper: rates of 0.02 and 0.01
for clients with and without labels, batches of 12, one local epoch, 1000 rounds. We read its "200 warm-ups" as rounds
before them; they may be among them. It takes 70 % of the images for training, 10 % for validation and 20 % for testing;
the file has 80 and 20 %. Ten clients, one of them with labels, the partition, pixels and backbone are those of RSCFed's
code, since the paper's are not public; so are its results. Its other data set, RSNA's haemorrhages, has batches of 24.
At our scale FedCD minus the labels alone is +8.12 ± 19.06 (board leaderboard/digits_some_clients).
Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/fedcd.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "fedcd,paper")
    config.data.source = "npz"
    config.data.path = "ham10000.npz"
    config.data.flip = True
    config.augment.resized = 250
    config.model.name = "resnet18_imagenet"
    config.eval_batch_size = 64
    config.eval_measures = ("balanced_accuracy", "precision", "auc")
    return apply_arguments(config, arguments)
