#!/usr/bin/env bash
# fluke: with balanced=True the Dirichlet partition gives images to several clients, or twice to one, and loses others.
#
# `DataSplitter.label_dirichlet_skew` draws shares by Dir(beta), then brings all clients to one size. A client with too
# many images loses some at random. A client with too few gets images that no earlier client has, but later ones and
# the client itself may have them. The number of images given out is right, so that nothing shows. The test images of
# clients are treated alike. Besides, `min_ex_class=2`, the default, gives every client images of every class. In the
# paper that the function cites (arXiv 2102.02079) clients may lack classes.
#
# Seen with fluke-fl 0.8.1 with torch 2.13.0, numpy 2.4.6. Output (5,000 images, 20 clients, beta 0.5):
#
#     fluke-fl 0.8.1
#     default: 5000 given, 5000 different, 0 twice at one client, classes of a client: at least 10
#     min_ex_class=0: 5000 given, 5000 different, 0 twice at one client, classes of a client: at least 6
#     min_ex_class=0, balanced=True: 5000 given, 4482 different, 45 twice at one client, classes of a client: at least 8
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet fluke-fl==0.8.1 torch==2.13.0 numpy==2.4.6
cd "$folder"
env/bin/python - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import torch
from fluke.data import DataSplitter

print("fluke-fl", version("fluke-fl"))
labels = torch.arange(10).repeat(500)
images = torch.zeros(len(labels), 1)
found = {}
for options in ({}, {"min_ex_class": 0}, {"min_ex_class": 0, "balanced": True}):
    np.random.seed(0)
    shares, _ = DataSplitter.label_dirichlet_skew(images, labels, None, None, 20, beta=0.5, **options)
    rows = np.concatenate(shares)
    twice = sum(len(share) - len(np.unique(share)) for share in shares)
    least = min(len(labels[share].unique()) for share in shares)
    found[len(options)] = len(rows), len(np.unique(rows)), twice, least
    name = ", ".join(f"{name}={value}" for name, value in options.items()) or "default"
    given, different, twice, least = found[len(options)]
    line = f"{given} given, {different} different, {twice} twice at one client"
    print(f"{name}: {line}, classes of a client: at least {least}")
assert found[0][:3] == found[1][:3] == (5000, 5000, 0) and found[0][3] == 10 > found[1][3]
given, different, twice, _ = found[2]
assert given == 5000 and different < 4900 and twice > 0
PYTHON
