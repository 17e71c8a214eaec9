"""A sweep of the stub: the module's `FILE`, or two rows and three seeds."""

import pytest

FILE = """
from fedjax_ssl.sweep import Sweep

def get_sweep():
    return Sweep(
        config="{config}",
        methods={{"Stub": "", "Revealed": ("", {{"data.reveal_labels": True}})}},
        seeds=(0, 1, 2),
        fields={{"data.server_labels": (40,)}},
        target_accuracy=0.3,
    )
"""
CONFIG = """
from tests.helpers.stub import make_stub_config
from fedjax_ssl.config import apply_arguments

def get_config(arguments=""):
    return apply_arguments(make_stub_config(num_rounds=2), arguments)
"""


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.py").write_text(CONFIG)
    (folder / "sweep.py").write_text(getattr(request.module, "FILE", FILE).format(config=folder / "tiny.py"))
    return str(folder / "sweep.py")
