"""The planned sweeps of one labelled client among many: each row's start, rounds, rates and options."""

import pytest

from fedjax_ssl.sweep import load_sweep, plan

# Rounds of the warm-up, rounds after it.
ROUNDS = {
    "semianagg_table.py:svhn": (250, 500),
    "semianagg_table.py:cifar100": (500, 1000),
    "semianagg_table.py:cifar100_lt": (500, 1000),
    "semianagg_table.py:isic": (250, 500),
    "semianagg_ablation.py:svhn": (250, 500),
    "semianagg_ablation.py:cifar100": (500, 1000),
    "semianagg_ablation.py:cifar100_lt": (500, 1000),
    "semianagg_ablation.py:isic": (250, 500),
    "semianagg_clients.py:50": (250, 500),
    "semianagg_partial.py:svhn": (250, 500),
    "semianagg_partial.py:isic": (250, 500),
    "some_clients.py:mnist": (40, 40),
    "some_clients.py:cifar10_lt": (40, 40),
    "some_clients.py:mnist_one_change": (40, 40),
    "some_clients.py:acr_plain_warm_up": (40, 4),
}
BOUNDS = ("FedAvg, all labels", "FedAvg, given labels", "the labelled client")


@pytest.fixture(scope="module")
def planned(root, tmp_path_factory):
    """Each sweep's configurations by row name, and those of the warm-ups."""
    folder, rows, warm_ups = tmp_path_factory.mktemp("sweeps"), {}, {}
    for name in ROUNDS:
        cells = plan(load_sweep(f"{root}/configs/sweeps/{name}"), folder)
        rows[name] = {cell.name: cell.config for cell in cells}
        warm_ups[name] = {cell.name: cell.warm_up and cell.warm_up.config for cell in cells}
    return rows, warm_ups


@pytest.mark.parametrize("name", ROUNDS)
def test_rows_begin_with_the_warm_up_and_have_their_rounds(planned, name):
    """Bounds and CBAFed have more rounds instead of a warm-up run; a role of IsoFed trains in every other round."""
    rows, warm_ups = (each[name] for each in planned)
    before, behind = ROUNDS[name]
    for row, config in rows.items():
        if row in BOUNDS or row.startswith("CBAFed"):
            assert warm_ups[row] is None and config.num_rounds == before + behind, row
        else:
            assert warm_ups[row].method == "supervised" and warm_ups[row].num_rounds == before, row
            assert config.num_rounds == (2 * behind if row.startswith("IsoFed") else behind), row
    if "CBAFed" in rows:
        assert rows["CBAFed"].cbafed.warm_up_rounds == before


@pytest.mark.parametrize("name", ROUNDS)
def test_averages_of_batches_last_for_the_run(planned, name):
    rows, checked = planned[0][name], 0
    for row, config in rows.items():
        if config.confidence.kind in ("freematch", "softmatch"):
            assert config.confidence.memory == "run", row
            steps = 500 * 72 if name.startswith("semianagg") else 40 * 9
            assert config.confidence.momentum**steps < 0.05, row  # the initial value is forgotten
            checked += 1
    assert checked == (
        2 if "ablation" in name or name in ("some_clients.py:mnist", "some_clients.py:cifar10_lt") else 0
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("semianagg_table.py:svhn", (64, 0.03, 0.021, 6.0, 1e4, 100.0)),
        ("semianagg_table.py:cifar100", (64, 0.03, 0.021, 6.0, 1e4, 100.0)),
        ("semianagg_table.py:isic", (12, 0.002, 0.001, 200.0, 0.01, 0.01)),
        ("semianagg_clients.py:50", (12, 0.002, 0.001, 200.0, 0.01, 0.01)),
        ("semianagg_partial.py:svhn", (64, 0.03, 0.021, 6.0, 1e4, 100.0)),
        ("semianagg_partial.py:isic", (12, 0.002, 0.001, 200.0, 0.01, 0.01)),
        ("some_clients.py:mnist", (32, 0.03, 0.021, 6.0, 1e4, 100.0)),
    ],
)
def test_rscfed_has_the_constants_of_its_data_set(planned, name, fields):
    config = planned[0][name]["RSCFed"]
    options, client = config.rscfed, config.client
    rates = client.batch_size, client.learning_rate, client.unlabelled_learning_rate
    assert (*rates, options.labelled_factor, options.beta, options.beta_labelled) == fields
    assert client.clip_norm == 5.0
    assert options.group_size == config.num_clients // 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("semianagg_table.py:svhn", (0.9, False, 1.0)),
        ("semianagg_table.py:cifar100", (0.95, True, 1.0)),
        ("semianagg_table.py:isic", (0.9, False, 10.0)),
        ("semianagg_clients.py:50", (0.9, False, 10.0)),
        ("semianagg_partial.py:svhn", (0.9, False, 1.0)),
        ("semianagg_partial.py:isic", (0.9, False, 10.0)),
    ],
)
def test_cbafed_has_the_options_of_its_data_set(planned, name, options):
    config = planned[0][name]["CBAFed"]
    assert (config.cbafed.cap, config.cbafed.second_labels, config.cbafed.labelled_factor) == options
    client = config.client
    assert (client.clip_norm, client.learning_rate, client.unlabelled_learning_rate) == (5.0, 0.03, 0.02)


@pytest.mark.parametrize("name", ROUNDS)
def test_semianagg_s_rows_differ_in_what_their_names_say(planned, name):
    rows = planned[0][name]
    for row, config in rows.items():
        if "SemiAnAgg" in row:
            assert config.method == "semianagg" and config.trainer.threshold == 0.9, row
            assert config.client.unlabelled_clip_norm == 5.0 and config.client.persistent, row
            assert config.semianagg.anchor_seed == ("another anchor" in row), row
            # Imbalanced data sets use the balanced softmax; so does MNIST, as SemiAnAgg's code always does.
            everywhere = any(part in name for part in ("isic", "_lt", "clients.py:50", ":mnist"))
            balanced = "ACR" not in row and ("code" in row or everywhere)
            assert config.client.logit_adjustment == float(balanced), row


@pytest.mark.parametrize("name", [name for name in ROUNDS if name.startswith("semianagg")])
def test_who_trains_on_both_views_of_a_labelled_image(planned, name):
    """SemiAnAgg's setting trains on both; RSCFed, IsoFed and CBAFed have their own, and ACR its own loss."""
    for row, config in planned[0][name].items():
        of_setting = config.method in ("semianagg", "fedavg_semi", "supervised")
        views = "both" if of_setting and "ACR" not in row else "weak"
        assert (config.client.labelled_views, config.client.spare_classifier) == (views, of_setting), row


@pytest.mark.parametrize("name", ["semianagg_partial.py:svhn", "semianagg_partial.py:isic"])
def test_every_client_has_a_tenth_of_its_labels(planned, name):
    """In all rows and in the warm-up, whatever the method's default."""
    rows, warm_ups = (each[name] for each in planned)
    for config in (*rows.values(), *filter(None, warm_ups.values())):
        assert (config.data.labels, config.data.labelled_share) == ("clients", 0.1)
        assert config.clients_per_round == config.num_clients == 10
    assert {config.method for config in rows.values()} == {"supervised", "rscfed", "cbafed", "fedavg_semi", "semianagg"}
