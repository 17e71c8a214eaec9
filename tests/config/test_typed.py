"""Configurations that were saved as JSON get their fields' types back."""

import json

import pytest

from fedjax_ssl import UserError, base_config
from fedjax_ssl.config import add_section, flatten, typed
from fedjax_ssl.methods import METHODS


def saved(config):
    return json.loads(json.dumps(config.to_dict()))


def test_a_saved_configuration_is_the_one_that_was_saved():
    """Fields keep their types, so that the run counts as the same and fields can be overridden."""
    config = base_config()
    for method in METHODS:
        config.method, config.snapshot_rounds, config.lanes = method, (1, 50), 3
        found = flatten(typed(saved(add_section(config)), "config.json"))
        assert found == flatten(config)
        assert {name: type(value) for name, value in found.items()} == {
            name: type(value) for name, value in flatten(config).items()
        }


@pytest.mark.parametrize(
    "changes, words",
    [({"client": {"tempo": 3}}, "client.tempo"), ({"num_rounds": "many"}, "num_rounds is"), ({"model": 3}, "model is")],
)
def test_a_field_that_does_not_fit_is_named(changes, words):
    with pytest.raises(UserError, match=rf"^config\.json: {words}"):
        typed({**saved(base_config()), **changes}, "config.json")
