"""SemiAnAgg on SVHN (TMLR 2024, arXiv 2407.10327), and other methods where one client of ten has labels.

    python launch.py --config=configs/semianagg_svhn.py:supervised --config.num_rounds=250 --workdir=runs/warm_up
    python launch.py --config=configs/semianagg_svhn.py --config.init_from=runs/warm_up
    python launch.py --config=configs/semianagg_svhn.py:fedavg_semi,uniform --config.init_from=runs/warm_up

ResNet-18, ten clients by Dir 0.8 (RSCFed's partition, whose published files can be given, see docs/how_to/own_data.md).
All take part.
One has labels for all its images. 250 rounds of that client alone, then 500 of all; configs/sweeps/semianagg_table.py
does both. Numbers that the paper leaves out are its public code's. Test accuracy as published, of which round is not
said:
    FedAvg, all labels     94.77
    the labelled client    75.86
    RSCFed                 81.84
    IsoFed                 82.48
    CBAFed                 91.57
    SemiAnAgg              91.69
Digits are flipped and cut out of 40x40 pixels, as in the code. Its balanced softmax on this set too is the variant
`code`. Arguments: alpha=, a backbone, other methods, the variants of fedjax_ssl/methods/semianagg.py.
"""

from fedjax_ssl.config import apply_arguments, base_config


def get_config(arguments=""):
    config = base_config()
    apply_arguments(config, "semianagg,paper")
    config.data.source = "svhn_cropped"
    return apply_arguments(config, arguments)
