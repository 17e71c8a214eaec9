"""(FL)^2's ablation: with and without its three parts, on SVHN with 40 labels, IID (NeurIPS 2024, arXiv 2410.23227).

    python launch.py sweep configs/sweeps/fl2_ablation.py --workdir=runs/fl2_ablation

The paper's accuracies: FedAvg+FixMatch 50.2, SACR alone 60.9, CAT alone 68.2, CAT and SACR 71.7, all three 73.2 (75.3
in its Table 1, of other seeds). The paper says that SACR on all images, instead of only the most confident ones, is
worse than no SACR. FixMatch here is (FL)^2 without its parts, so its labels are made once a round.
"""

from fedjax_ssl.sweep import Sweep


def get_sweep():
    return Sweep(
        config="configs/fl2_svhn.py",
        common={"data.partition": "iid"},
        methods={
            "FedAvg+FixMatch": "no_cat,no_sacr,no_lsaa",
            "SACR": "no_cat,no_lsaa",
            "CAT": "no_sacr,no_lsaa",
            "CAT and SACR": "no_lsaa",
            "(FL)^2": "",
            "(FL)^2, SACR on all images": "sacr_on_all",
        },
        target_accuracy=0.7,
    )
