"""What reports say of runs whose clients attack, fail, compress, or are private."""

import types

import numpy as np

from fedjax_ssl.report.conditions import conditions
from tests.helpers.tiny_methods import make_config

UNTRUSTED = {
    "aggregation.mean": "trimmed_mean",
    "attack.kind": "sign_flip",
    "attack.share": 0.25,
    "availability.never": 0.3,
    "availability.late": 0.3,
    "compression.kind": "top_k",
    "compression.share": 0.1,
}
PRIVATE = {
    "privacy.noise": 4.0,
    "privacy.cohorts": "poisson",
    "aggregation.clip_norm": 0.5,
    "availability.never": 0.2,
    "model.normalisation": "group",
}


def test_reports_say_under_what_conditions_clients_worked():
    """Of an ordinary run nothing, and of each section that is not at its default a sentence."""
    config = make_config("fedanchor")
    lines = [
        {"uploads": 5, "byzantine_uploads": 1, "epsilon": 2.345},
        {"uploads": 4, "byzantine_uploads": 2, "epsilon": 3},
    ]
    values = lambda name: np.array([line[name] for line in lines])  # noqa: E731
    told = lambda: conditions(types.SimpleNamespace(config=config, metrics=lines, values=values))  # noqa: E731
    assert told() == []
    config.update_from_flattened_dict({**UNTRUSTED, **PRIVATE})
    assert told() == [
        "2 of 8 clients attack (attack.kind sign_flip), with 3 of 9 uploads.",
        "The mean of uploads is trimmed_mean.",
        "20 % of each cohort do not answer.",
        "30 % of the uploads are a round late, and count 1 times.",
        "Uploads are compressed: top_k of 10 %.",
        "Noise of 4 times the clipping norm, in poisson cohorts: clients have (3, 1e-05)-differential privacy "
        "by this run alone; the guarantees of further runs on the same clients add up.",
    ]
    config.privacy.reproducible = True
    assert told()[-1].endswith(" only if nobody knows the seed, from which the noise follows (privacy.reproducible).")
