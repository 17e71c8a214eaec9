"""Domains: upright digits have labels, at the server; clients hold rotated or inverted ones without labels.

    python launch.py sweep configs/sweeps/domains.py --workdir=runs/domains --config.data.path=domains.npz

docs/how_to/own_data.md makes the file. 20 clients of one domain each, five in a round, 40 rounds, five seeds, every
method with its own values. Records have the accuracy on each domain.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/quickstart.py",
        common={"data.source": "npz", "data.server_domain": "upright", "data.partition": "domains"},
        methods={
            "Labels alone": "supervised",
            "FedAnchor": "fedanchor",
            "SemiFL": "semifl",
            "FixMatch": "fixmatch",
            "SAGE": "sage",
            "FedRGD": "fedrgd",
            "(FL)^2": "fl2",
            "CATCHFed": "catchfed",
            "BSemiFL": "bsemifl",
            "imFed-Semi": "imfed_semi",
            "All labels": "supervised,all_labels",
        },
        seeds=(0, 1, 2, 3, 4),
    )
