#!/usr/bin/env bash
# pfl: a round's cohort has users twice or more, so that "all 100 users" are about 63.
#
# `FederatedDataset.from_slices_with_dirichlet_class_distribution` splits data among artificial
# users and then draws cohorts "uniformly at random". Federated averaging, and Flower's or FedJAX's
# samplers, draw different clients for a round. pfl draws each one from all users again. With a
# cohort as large as the population about a third of the users are left out, and some users count
# three or four times, so that a round's mean is not that of the cohort's users. Nothing is said.
# `get_user_sampler("random", ...)` is the same. "minimize_reuse" goes through the users in turn.
#
# Source: pfl/data/sampling.py, `get_user_sampler`: one np.random.randint for each user of a cohort.
# Seen with pfl 0.6.0 with numpy 2.4.6. Output (100 users of 20 rows):
#
#     pfl 0.6.0
#     cohort of 100: 61 different users, one of them 4 times
#     cohorts of 50: 39.6 different users on average, in 0 of 200 rounds all different
#     minimize_reuse, cohort of 100: 100 different users
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pfl==0.6.0 numpy==2.4.6 scipy==1.17.1
cd "$folder"
env/bin/python - 2> messages <<'PYTHON' || { cat messages; exit 1; }
from collections import Counter
from importlib.metadata import version

import numpy as np
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler

print("pfl", version("pfl"))
np.random.seed(0)
labels = np.repeat(np.arange(10), 200)
data = FederatedDataset.from_slices_with_dirichlet_class_distribution(
    (np.arange(2000), labels), labels, alpha=1.0, user_dataset_len_sampler=lambda: 20
)


def cohort(data, size):
    return Counter(user.user_id for user, _ in data.get_cohort(size))


users = cohort(data, 100)
most = max(users.values())
print(f"cohort of 100: {len(users)} different users, one of them {most} times")
assert len(users) < 75 and most >= 3
different = [len(cohort(data, 50)) for _ in range(200)]
print(f"cohorts of 50: {np.mean(different):.1f} different users on average, "
      f"in {different.count(50)} of 200 rounds all different")
assert 37 < np.mean(different) < 42
rows = {user: (np.zeros(20),) for user in range(100)}
in_turn = FederatedDataset.from_slices(rows, get_user_sampler("minimize_reuse", list(rows)))
print(f"minimize_reuse, cohort of 100: {len(cohort(in_turn, 100))} different users")
assert len(cohort(in_turn, 100)) == 100
PYTHON
