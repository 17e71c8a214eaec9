#!/usr/bin/env bash
# FedArtML: the earth mover's distance between clients is 0 where no two clients share a class.
#
# FedArtML tells how far a federation is from IID by three distances between its clients' shares of
# classes. The earth mover's distance calls SciPy's `wasserstein_distance(p, q)`, which takes
# samples, not probabilities: the order of the shares does not count. Clients with one class each,
# (1, 0, 0, 0) and (0, 1, 0, 0), are equal for it. The most heterogeneous split has the distance of
# a perfect IID split, less than Dirichlet with alpha=1000. The other two distances say 1 of at
# most 1. With the classes as values and the shares as weights SciPy gives 1.
#
# Source: fedartml/function_base.py, `earth_movers_distance`.
# Seen with FedArtML 0.1.34 with scipy 1.17.1, numpy 2.4.6, pandas 3.1.1. Output:
#
#     FedArtML 0.1.34
#     one class each: jensen-shannon 1.000, hellinger 1.000, earth-movers 0.000
#     Dirichlet, alpha 1: jensen-shannon 0.443, hellinger 0.481, earth-movers 0.269
#     Dirichlet, alpha 1000: jensen-shannon 0.019, hellinger 0.018, earth-movers 0.075
#     SciPy of two such clients: of shares 0, of classes 1
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
# FedArtML imports scikit-learn and does not declare it.
"$folder/env/bin/pip" install --quiet FedArtML==0.1.34 scikit-learn==1.9.1 scipy==1.17.1 \
    numpy==2.4.6 pandas==3.1.1
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
from importlib.metadata import version

import numpy as np
from fedartml import SplitAsFederatedData
from scipy.stats import wasserstein_distance

print("FedArtML", version("FedArtML"))
labels = np.repeat(np.arange(4), 250)
images = [[row] for row in range(len(labels))]
cases = {
    "one class each": {"method": "percent_noniid", "percent_noniid": 100},
    "Dirichlet, alpha 1": {"method": "dirichlet", "alpha": 1},
    "Dirichlet, alpha 1000": {"method": "dirichlet", "alpha": 1000},
}
earth = {}
for name, options in cases.items():
    clients, _, _, distances, *_ = SplitAsFederatedData(random_state=0).create_clients(
        image_list=images, label_list=labels.tolist(), num_clients=4, prefix_cli="client", **options
    )
    classes = [sorted({label for _, label in client})
               for client in clients["without_class_completion"].values()]
    found = distances["without_class_completion"]
    earth[name] = found["earth-movers"]
    print(f"{name}: " + ", ".join(f"{kind} {abs(value):.3f}" for kind, value in found.items()))
    if name == "one class each":
        assert classes == [[0], [1], [2], [3]]
        assert found["jensen-shannon"] == found["hellinger"] == 1
print("SciPy of two such clients: "
      f"of shares {wasserstein_distance([1, 0, 0, 0], [0, 1, 0, 0]):.0f}, "
      f"of classes {wasserstein_distance(range(4), range(4), [1, 0, 0, 0], [0, 1, 0, 0]):.0f}")
assert earth["one class each"] == 0 < earth["Dirichlet, alpha 1000"] < earth["Dirichlet, alpha 1"]
PYTHON
