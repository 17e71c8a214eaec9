"""Where a federation's arrays lie, by arithmetic; what does not fit is said in a line."""

import sqlite3
import types

import pytest

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import base_config
from fedjax_ssl.run.residence import choose


def held(gigabytes, unknown=None):
    image, none = types.SimpleNamespace(nbytes=gigabytes * 2**30), types.SimpleNamespace(nbytes=0)
    others = None if unknown is None else types.SimpleNamespace(nbytes=unknown * 2**30)
    return types.SimpleNamespace(inputs=image, test_inputs=none, unknown_inputs=others)


def config_with(**fields):
    config = base_config()
    config.update_from_flattened_dict({"num_clients": 1000, "num_rounds": 10, "clients_per_round": 10, **fields})
    return config


@pytest.mark.parametrize("gigabytes, memory, width, expected", [
    (1, 1, 50, ("device", "device", True)),
    (8, 1, 50, ("host", "host", False)),  # the images take more than a quarter of the device's memory
    (1, 8, 50, ("device", "host", False)),  # the clients' memory does
    (1, 100, 50, ("device", "disk", False)),  # so does that of the hundred clients in ten rounds
    (1, 1, 10**6, ("device", "host", False)),  # a table of all clients does not fit
])  # fmt: skip
def test_what_auto_chooses(gigabytes, memory, width, expected):
    chosen = choose(config_with(), held(gigabytes), memory * 2**30, 16 * 2**30, width)
    assert tuple(chosen) == expected


@pytest.mark.parametrize("fields, words", [
    ({"residence.data": "device"}, "residence.data='device' needs 20.0 GiB, but the device has 16.0"),
    ({"residence.clients": "device"}, "residence.clients='device' needs 30.0 GiB"),
])  # fmt: skip
def test_what_does_not_fit_is_said_by_arithmetic(fields, words):
    with pytest.raises(UserError, match=words.replace("'", ".")) as caught:
        choose(config_with(**fields), held(20), 30 * 2**30, 16 * 2**30, 50)
    assert "\n" not in str(caught.value)


def test_what_fits_only_without_the_other_is_said_by_arithmetic():
    asked = {"residence.data": "device", "residence.clients": "device"}
    words = "^residence.data='device' and residence.clients='device' need 17.0 GiB, but the device has 16.0; set "
    for images in (held(9), held(5, unknown=4)):
        with pytest.raises(UserError, match=words + r"residence.clients='host'$"):
            choose(config_with(**asked), images, 8 * 2**30, 16 * 2**30, 50)
        assert choose(config_with(**asked), images, 7 * 2**30, 16 * 2**30, 50).whole
    with pytest.raises(UserError, match=r"need 18.0 .*; set residence.data='host' and residence.clients='host'$"):
        choose(config_with(**asked), held(17), 2**30, 16 * 2**30, 50)
    assert choose(config_with(), held(3, unknown=2), 1, 16 * 2**30, 50).images == "host"


def test_a_row_that_sqlite_does_not_take_is_said_by_arithmetic():
    with sqlite3.connect(":memory:") as file:
        most = file.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)  # bytes of a whole row
    of_ten, room = {"num_clients": 10, "clients_per_round": 2}, 2**40
    for place in ("host", "disk"):
        config = config_with(**of_ten, **{"residence.clients": place})
        assert choose(config, held(1), 10 * (most - 1000), room, 50).clients == place
        with pytest.raises(UserError, match=f"residence.clients='{place}' .* row of 1.00 GB.* SQLite") as caught:
            choose(config, held(1), 10 * most, room, 50)
        assert "\n" not in str(caught.value)
    assert choose(config_with(**of_ten), held(1), 10 * most, room, 50).clients == "device"
