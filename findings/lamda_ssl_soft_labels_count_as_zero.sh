#!/usr/bin/env bash
# LAMDA-SSL: soft labels are cut to whole numbers, so that most unlabelled images have no loss.
#
# UDA, ICT and ReMixMatch train unlabelled images by cross-entropy with soft labels, such as
# (0.1, 0.7, 0.2). `Cross_Entropy(use_hard_labels=False)` turns labels into integers first, also
# soft ones: 0.7 becomes 0, and the loss and its gradient are 0, unless float32 rounds a number to
# 1. ICT then is training with labels alone, whatever `lambda_u`. UDA, which sharpens its labels,
# counts images from a confidence of about 0.999 on. ReMixMatch and MixMatch mix the labels of
# labelled images, too, and these are lost as well: ReMixMatch learns little but rotations, and
# MixMatch is hardly ever told a class. No line says so. FixMatch and the default of FlexMatch have
# hard labels and are not concerned.
#
# Source: LAMDA_SSL/Loss/Cross_Entropy.py, `forward`: targets=targets.long() for both kinds.
# Seen with LAMDA-SSL 1.0.2 with torch 2.13.0, scikit-learn 1.4.2, numpy 1.26.4. Output (64 images
# of each kind, 10 classes; torchvision is left out, as only images need it):
#
#     LAMDA-SSL 1.0.2
#     cross-entropy with (0.1, 0.7, 0.2): 0.000, PyTorch 2.170
#     FixMatch, gradients: labelled 0.1279, strong 0.1251
#     UDA, gradients: labelled 0.1279, strong 0.0000
#     ICT, gradients: labelled 0.1279, unlabelled 0.0000
#     ReMixMatch, gradients: labelled 0.0000, unlabelled 0.0000, strong 0.0000, rotated 0.0569
#     MixMatch, gradients: labelled 0.0000, unlabelled 0.0045
#     UDA's loss of an unlabelled image of confidence 0.95: 0.000
#     UDA's loss of an unlabelled image of confidence 0.99: 0.000
#     UDA's loss of an unlabelled image of confidence 0.998: 0.000
#     UDA's loss of an unlabelled image of confidence 0.9999: 0.693
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0 scikit-learn==1.4.2 numpy==1.26.4 pillow==12.0.0 setuptools==80.9.0
"$folder/env/bin/pip" install --quiet --no-deps lamda-ssl==1.0.2
cd "$folder"
env/bin/python -W ignore - 2> messages <<'PYTHON' || { cat messages; exit 1; }
import sys
from importlib.metadata import version
from unittest.mock import MagicMock

for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
    sys.modules[name] = MagicMock()

import torch
from LAMDA_SSL.Algorithm.Classification.FixMatch import FixMatch
from LAMDA_SSL.Algorithm.Classification.ICT import ICT
from LAMDA_SSL.Algorithm.Classification.MixMatch import MixMatch
from LAMDA_SSL.Algorithm.Classification.ReMixMatch import ReMixMatch
from LAMDA_SSL.Algorithm.Classification.UDA import UDA
from LAMDA_SSL.Loss.Cross_Entropy import Cross_Entropy
from torch.nn.functional import cross_entropy, one_hot

print("LAMDA-SSL", version("lamda-ssl"))
logits, soft = torch.tensor([[2.0, 0, -1]]), torch.tensor([[0.1, 0.7, 0.2]])
theirs, pytorch = Cross_Entropy(use_hard_labels=False)(logits, soft), cross_entropy(logits, soft)
print(f"cross-entropy with (0.1, 0.7, 0.2): {theirs:.3f}, PyTorch {pytorch:.3f}")
assert theirs == 0 and pytorch > 1

torch.manual_seed(0)
labels = torch.randint(10, (64,))
guesses = torch.full((64, 10), 0.01)
guesses[range(64), torch.randint(10, (64,))] = 0.91  # a weakly augmented image's probabilities
mixed = 0.7 * one_hot(labels, 10) + 0.3 * guesses  # what mixup makes of the labels
labelled, unlabelled, strong = (torch.randn(64, 10, requires_grad=True) for _ in range(3))
rotated = torch.randn(64, 4, requires_grad=True)
batches = {
    FixMatch: (labelled, labels, guesses.log(), strong),
    UDA: (labelled, labels, guesses.log(), strong),
    ICT: (labelled, labels, guesses.log(), guesses.flip(0).log(), unlabelled, 0.7),
    ReMixMatch: (labelled, mixed, unlabelled, guesses, strong, guesses, rotated, labels % 4),
    MixMatch: (labelled, mixed, unlabelled, guesses),
}
lengths = {}
for method, batch in batches.items():
    algorithm = method()
    algorithm.it_total = algorithm.num_it_total = 1000  # after the warm-up
    loss = algorithm.get_loss(batch)
    parts = {"labelled": labelled, "unlabelled": unlabelled, "strong": strong, "rotated": rotated}
    gradients = torch.autograd.grad(loss, list(parts.values()), allow_unused=True)
    lengths[method] = {part: float(g.norm()) for part, g in zip(parts, gradients) if g is not None}
    print(f"{method.__name__}, gradients:", ", ".join(f"{part} {g:.4f}" for part, g in lengths[method].items()))
assert lengths[FixMatch]["strong"] > 0.01 and lengths[UDA]["strong"] == lengths[ICT]["unlabelled"] == 0
assert lengths[ReMixMatch]["labelled"] == lengths[ReMixMatch]["unlabelled"] == lengths[ReMixMatch]["strong"] == 0
assert lengths[ReMixMatch]["rotated"] > 0.01 and lengths[MixMatch]["labelled"] == 0

for confidence in (0.95, 0.99, 0.998, 0.9999):
    weak = torch.tensor([[confidence, 1 - confidence]]).log()
    batch = (torch.zeros(1, 2), torch.tensor([0]), weak, torch.zeros(1, 2))
    loss = {weight: float(UDA(num_classes=2, lambda_u=weight).get_loss(batch)) for weight in (0, 1)}
    print(f"UDA's loss of an unlabelled image of confidence {confidence}: {loss[1] - loss[0]:.3f}")
    assert (loss[1] > loss[0]) == (confidence > 0.999)
PYTHON
