"""Where a federation is stored (`config.residence`). Sizes decide it before anything is compiled."""

from typing import Any, NamedTuple

import jax

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.data.federated import Holdings
from fedjax_ssl.data.views import MOST_ENTRIES
from fedjax_ssl.engine.interface import State
from fedjax_ssl.ops.trees import tree_bytes
from fedjax_ssl.records.client_rows import MOST_ROW_BYTES

SHARE = 4  # images and the clients' memory may each take 1 / SHARE of the device's memory


class Residence(NamedTuple):
    """Where the parts of a federation are stored."""

    images: str  # 'device' or 'host'
    clients: str  # of the clients' memory and records: 'device', 'host' or 'disk'
    whole: bool  # whether the device holds all images, rows and clients' memory


def choose(config: Any, held: Holdings, memory_bytes: int, device_bytes: int | None, width: int) -> Residence:
    """Decides where the parts of a federation are stored, by `config.residence` and by sizes.

    The memory of a device, `device_bytes`, is assumed to be enough if it is None; `width` is n_max. Raises a UserError
    if the configuration's choice does not fit or contradicts itself.
    """
    asked, num_clients = config.residence, config.num_clients
    inputs = (held.inputs, held.test_inputs, held.unknown_inputs)
    image_bytes = sum(array.nbytes for array in inputs if array is not None)
    room = float("inf") if device_bytes is None else device_bytes
    large_table = num_clients * width > MOST_ENTRIES
    images, clients = asked.data, asked.clients
    if images == "auto":
        images = "host" if image_bytes > room / SHARE else "device"
    if clients == "auto":
        fits = memory_bytes <= min(room / SHARE, room - image_bytes)
        clients = "device" if images == "device" and not large_table and fits else "host"
        rows = min(num_clients, config.num_rounds * config.clients_per_round)
        if clients == "host" and memory_bytes / num_clients * rows > room / SHARE:
            clients = "disk"
    on_device = {"data": image_bytes * (images == "device"), "clients": memory_bytes * (clients == "device")}
    if (needed := sum(on_device.values())) > room:
        there = [f"residence.{field}='device'" for field, taken in on_device.items() if taken]
        # Images may stay if they fit alone; clients' memory is on the device only beside them.
        away = [f"residence.{field}='host'" for field, taken in on_device.items() if taken > room * (field == "data")]
        raise UserError(
            f"{' and '.join(there)} need{'s' * (len(there) == 1)} {needed / 2**30:.1f} GiB, but the device has "
            f"{room / 2**30:.1f}; set {' and '.join(away)}"
        )
    whole = images == "device" and clients == "device" and not large_table
    if clients == "device" and not whole and memory_bytes:
        why = "residence.data='host'" if images == "host" else f"{num_clients:,} clients of up to {width:,} images"
        raise UserError(f"residence.clients='device' does not go with {why}; set residence.clients='host'")
    if clients != "device" and (row := memory_bytes // num_clients) > MOST_ROW_BYTES:
        raise UserError(
            f"residence.clients={clients!r} keeps a row of {row / 1e9:.2f} GB for each client, but SQLite takes at "
            f"most {MOST_ROW_BYTES / 1e9:.2f}; make the model smaller, or set residence.data='device' and "
            "residence.clients='device'"
        )
    return Residence(images, clients, whole)


def memory_bytes(state: State, num_clients: int) -> int:
    """Bytes of all clients' memory and records, computed from the shapes for some clients."""
    leaves = jax.tree.leaves(state.of_clients)
    return tree_bytes(state.of_clients) // len(leaves[0]) * num_clients if leaves else 0
