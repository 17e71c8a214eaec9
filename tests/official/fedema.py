"""FedEMA: clients train by BYOL from an average of their own last networks and the global networks.

EasyFL-AI/EasyFL@8a9554e: applications/fedssl/client.py (`update_model` with --update_encoder=dynamic_ema_online
--update_predictor=dynamic_dapu, and with selective_ema for both; `_calculate_weight_scaler`).
"""

import pytest

from tests.official.byol import ENCODER, ONLINE, RATE, average, compare, divergence, problem_of, train_client

TAU = 0.6
SLOW = pytest.param("fedema,code", False, marks=pytest.mark.slow)
SELECTIVE = pytest.param("fedema", True, marks=pytest.mark.test_all)


@pytest.mark.parametrize("variant, selective", [("fedema", False), SLOW, SELECTIVE])
def test_rounds_of_fedema(variant, selective, monkeypatch):
    """With `selective`, two clients train in a round; only clients of the round before continue with their own
    networks.
    """
    monkeypatch.setattr("fedjax_ssl.client.byol.DECAY", 0.9)
    fields = {"fedema.selective": selective, "clients_per_round": 2 if selective else 3}
    problem = problem_of(variant, **fields, **{"fedema.tau": TAU})
    shares = []

    def visit(number, client, received, job, own):
        params, target = dict(received["params"]), {part: received["params"][part] for part in ENCODER}
        alias = problem.config.fedema.replica and not own
        goes_on = bool(own) and (not selective or own["round"] == number - 1)
        if goes_on:
            share = min(1.0, own["scale"] * own["divergence"])
            shares.append(share)
            params.update(average({part: own["params"][part] for part in ONLINE}, params, share))
            target = own["target"]
        elif own:
            shares.append("new")
        before = {**received, "params": params}
        after, target = train_client(problem, job, before, target, 0.9, RATE, alias)
        moved = divergence(before, after)
        scale = own.get("scale", TAU / moved)
        own.update(target=target, params=after["params"], divergence=moved, scale=scale, round=number)
        return after

    what = "clients that paused begin anew" if selective else "first target aliased" if "code" in variant else "rounds"
    compare("fedema", what, problem, 5 if selective else 3, visit)
    averaged = [share for share in shares if share != "new"]
    assert len(averaged) > 2 and len(set(averaged)) > 2
    assert ("new" in shares) == selective
