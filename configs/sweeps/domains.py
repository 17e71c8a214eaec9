"""Domains: upright digits have labels, at the server; clients hold rotated or inverted ones without labels.

    python launch.py sweep configs/sweeps/domains.py --workdir=runs/domains --config.data.path=domains.npz

docs/how_to/own_data.md makes the file. 20 clients of one domain each, five in a round, 40 rounds, five seeds, every
method with its own values. Records have the accuracy on each domain. Measured, mean of the last five rounds:

                upright        rotated       inverted
Labels alone    84.3 +- 3.9     8.2 +- 0.7    8.3 +- 2.4
imFed-Semi      85.7 +- 3.8     6.7 +- 3.5   10.3 +- 3.7
FedAnchor       85.0 +- 3.2     9.1 +- 4.0   11.1 +- 1.4
FixMatch        77.9 +- 4.9     6.6 +- 1.8    8.8 +- 1.8
SemiFL          42.1 +- 35.2    7.7 +- 1.4   10.0 +- 2.4
FedRGD          41.5 +- 18.9    8.0 +- 0.9    9.8 +- 3.8
SAGE            36.1 +- 34.2    6.9 +- 1.7   10.2 +- 2.5
BSemiFL         24.1 +- 28.3    7.8 +- 0.8   10.1 +- 3.7
(FL)^2          12.5 +- 1.4     7.5 +- 0.0   12.5 +- 0.0
CATCHFed        11.7 +- 1.6     8.5 +- 1.8   10.7 +- 2.5
All labels      54.4 +- 6.5    80.1 +- 6.7   73.0 +- 8.1

No method gains: on the clients' domains all are at chance, as the pseudo-labels there are wrong. On the server's domain
imFed-Semi and FedAnchor are level with the labels alone (+1.4 +- 2.2 and +0.7 +- 1.6, 95 % intervals by seed), and all
others lose.
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
