"""FedU: clients train by BYOL; their last divergence decides between the global predictor and the client's own.

EasyFL-AI/EasyFL@8a9554e: applications/fedssl/client.py (`update_model` with --update_predictor=dapu,
`_DAPU_predictor_usage`), server.py (`aggregation`). The divergence is that of the client's last training. The client's
own predictor is used unless the divergence is below the threshold.
"""

import pytest

from tests.official.byol import ENCODER, RATE, compare, divergence, problem_of, train_client

THRESHOLD = 0.08
SLOW = [pytest.param(variant, marks=pytest.mark.slow) for variant in ("fedu", "fedu,both")]


@pytest.mark.parametrize("variant", ["fedu,code", *SLOW])
def test_rounds_of_fedu(variant, monkeypatch):
    """The first target is a copy of the received encoder or, as in the code, the online encoder itself."""
    monkeypatch.setattr("fedjax_ssl.client.byol.DECAY", 0.9)
    problem = problem_of(variant, **{"fedu.threshold": THRESHOLD})
    used = []

    def visit(number, client, received, job, own):
        params, encoder = dict(received["params"]), {part: received["params"][part] for part in ENCODER}
        alias = problem.config.fedu.replica and not own
        target = own["target"] if own and variant != "fedu,both" else encoder
        if own:
            used.append("own" if own["divergence"] >= THRESHOLD else "global")
            if used[-1] == "own":
                params["predictor"] = own["predictor"]
        before = {**received, "params": params}
        after, target = train_client(problem, job, before, target, 0.9, RATE, alias)
        own.update(target=target, predictor=after["params"]["predictor"], divergence=divergence(before, after))
        return after

    what = {
        "fedu": "own and global predictors",
        "fedu,code": "first target aliased",
        "fedu,both": "both encoders received",
    }
    compare("fedu", what[variant], problem, 3, visit)
    assert set(used) == {"own", "global"}
