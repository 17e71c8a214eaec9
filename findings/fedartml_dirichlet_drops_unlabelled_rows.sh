#!/usr/bin/env bash
# FedArtML: the Dirichlet split drops all rows whose label is not 0 to C - 1, such as -1.
#
# `create_clients(method="dirichlet")` counts the different labels and then divides the rows with
# labels 0, 1 and so on up to that number. In a semi-supervised data set -1 marks an unlabelled row:
# it counts as a label, but none of its rows goes to a client. Labels 1 to 10 lose class 10. No line
# says so. The documentation of "without_class_completion" says that clients' rows add up to all
# rows. "with_class_completion" gives every client the same first row of the lost class, so that all
# classes seem to be there. The method "percent_noniid" keeps all rows.
#
# Source: fedartml/fl_split_as_federated_data.py, `dirichlet_method`: for k in range(num_classes).
# Seen with FedArtML 0.1.34 with numpy 2.4.6, pandas 3.1.1. Output:
#
#     FedArtML 0.1.34
#     labels 0 to 9, without_class_completion: 1000 of 1000 rows, 100 of label 9
#     labels 0 to 9, with_class_completion: 1000 of 1000 rows, 100 of label 9
#     labels 600 of -1, else 0 to 9, without_class_completion: 400 of 1000 rows, 0 of label -1
#     labels 600 of -1, else 0 to 9, with_class_completion: 401 of 1000 rows, 1 of label -1
#     labels 1 to 10, without_class_completion: 900 of 1000 rows, 0 of label 10
#     labels 1 to 10, with_class_completion: 901 of 1000 rows, 1 of label 10
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

print("FedArtML", version("FedArtML"))
classes = np.repeat(np.arange(10), 100)
images = [[row] for row in range(len(classes))]
unlabelled = classes.copy()
unlabelled[np.random.default_rng(0).permutation(1000)[:600]] = -1
cases = {"0 to 9": (classes, 1000, 9), "600 of -1, else 0 to 9": (unlabelled, 400, -1),
         "1 to 10": (classes + 1, 900, 10)}
for name, (labels, kept, last) in cases.items():
    clients, *_ = SplitAsFederatedData(random_state=0).create_clients(
        image_list=images, label_list=labels.tolist(), num_clients=4, prefix_cli="client",
        method="dirichlet", alpha=1,
    )
    rows = {}
    for kind in ("without_class_completion", "with_class_completion"):
        examples = [example for client in clients[kind].values() for example in client]
        rows[kind] = len({image[0] for image, _ in examples})
        of_last = len({image[0] for image, label in examples if label == last})
        print(f"labels {name}, {kind}: {rows[kind]} of 1000 rows, {of_last} of label {last}")
    assert rows["without_class_completion"] == kept
    assert rows["with_class_completion"] == (1000 if kept == 1000 else kept + 1)
PYTHON
