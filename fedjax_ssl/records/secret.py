"""secret.json: the secret of a private run, from which its noise and its cohorts are drawn.

Only the user may read it. Whoever has it can subtract the noise, so that nothing else shows it.
"""

import pathlib

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.records.sealed import read_sealed, write_sealed
from fedjax_ssl.records.workdir import SECRET

NUM_BYTES = 32


def write_secret(folder: pathlib.Path, secret: bytes) -> None:
    """Writes a run's secret."""
    write_sealed(folder / SECRET, {"secret": secret.hex()}, mode=0o600)


def read_secret(folder: pathlib.Path) -> bytes:
    """A run's secret.

    Raises:
        UserError: it is missing or damaged. With another one the run would publish its rounds with other noise.
    """
    try:
        return bytes.fromhex(read_sealed(folder / SECRET)["secret"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or "it is not what was written"
        raise UserError(
            f"cannot read the secret of the private run, {folder / SECRET}: {why}; put it back, or train in another "
            "workdir"
        ) from error
