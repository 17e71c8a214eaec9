"""A user's own backbone by import path: the same as the library's where it is the same, and the errors one by one."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from fedjax_ssl.base.errors import UserError
from fedjax_ssl.config import apply_arguments, base_config
from fedjax_ssl.data import Dataset, dataset_facts
from fedjax_ssl.data.kinds import IMAGE, KINDS
from fedjax_ssl.models import BACKBONES, POLICIES, build_model
from fedjax_ssl.models.network import build_network
from fedjax_ssl.run.machine import find_machine
from tests.helpers.runs import make_fedanchor_config as make_tiny_config

HEADER = """import functools
import flax.linen as nn
import jax.numpy as jnp
from fedjax_ssl.models import Normalisation
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """An empty current folder; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith(("own", "fedjax_ssl_own")):
            del sys.modules[name]


def network(name, image_shape=(8, 8, 1), **overrides):
    config = base_config()
    config.model.update({"name": name, **overrides})
    images, labels = np.zeros((2, *image_shape), np.uint8), np.zeros(2, np.int32)
    channels = image_shape[-1]
    dataset = Dataset("none", images, labels, images, labels, 10, (0.5,) * channels, (0.5,) * channels, False)
    return build_network(config, dataset_facts(dataset), KINDS[IMAGE])


def write(path, *lines, call=None, fields=""):
    """Writes a file of Python; with `call` one of a class Mine with this `__call__`, a list of its lines."""
    if call is not None:
        lines = ["class Mine(nn.Module):", f"    {fields}", "    @nn.compact", *(f"    {line}" for line in call)]
        lines[4:] = [f"    {line}" for line in lines[4:]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("from __future__ import annotations\n" + HEADER + "\n".join(lines) + "\n")


FLAT = "x = images.reshape(len(images), -1)"
POLICY = "normalisation: str = 'static'"


def test_the_librarys_own_backbone_by_its_path_is_the_same():
    config = {"normalisation": "static", "dtype": "float32", "classifier_init": "lecun", "width": 0}
    named = build_model(ConfigDict({"name": "cnn", **config}), 10)
    assert build_model(ConfigDict({"name": "fedjax_ssl.models.cnn:SmallCNN", **config}), 10) == named
    for policy in POLICIES:
        assert network("fedjax_ssl.models.cnn:SmallCNN", normalisation=policy).normalisation == policy


def test_a_module_of_the_current_folder_and_a_file(own_folder, monkeypatch):
    call = ["def __call__(self, images):", FLAT, "return nn.Dense(7)(x)"]
    write(own_folder / "own_package" / "own_models.py", call=call)
    built = network("own_package.own_models:Mine")
    params, batch_stats = jax.eval_shape(built.init, jax.random.key(0))
    assert params["classifier"]["kernel"].shape == (7, 10) and batch_stats == {}
    # A file may lie anywhere, may have any module's name, and imports what lies beside it.
    write(own_folder / "far" / "own_helper.py", "WIDTH = 5")
    write(
        own_folder / "far" / "random.py",
        "from own_helper import WIDTH",
        "class Mine(nn.Module):",
        "    width: int = WIDTH",
        "    @nn.compact",
        "    def __call__(self, images):",
        "        return nn.Dense(self.width)(images.mean((1, 2)))",
    )
    for name in ("far/random.py:Mine", f"{own_folder}/far/random.py:Mine"):
        params, _ = jax.eval_shape(network(name).init, jax.random.key(0))
        assert params["classifier"]["kernel"].shape == (5, 10)
    import random

    assert hasattr(random, "randint")


def test_a_plain_module_is_adapted(own_folder):
    """Each view and each image is treated as the module itself treats it; the statistics of others are not touched."""
    layers = ["x = nn.relu(nn.Conv(4, (3, 3))(images))", "x = nn.GroupNorm(2)(x)", "return x.mean((1, 2))"]
    write(own_folder / "own_plain.py", call=["def __call__(self, images):", *layers])
    write(
        own_folder / "own_train.py", call=["def __call__(self, x, train):", "images = x if train else x + 1", *layers]
    )
    images = jax.random.uniform(jax.random.key(0), (5, 8, 8, 1), maxval=255.0)
    mask = jnp.arange(5) < 3
    # There are no statistics to be taken or sent.
    kinds = {policy: network("own_plain:Mine", normalisation=policy).normalisation for policy in POLICIES}
    assert kinds == {"static": "group", "running": "group", "group": "group", "none": "none"}
    built = network("own_plain:Mine")
    model = jax.jit(built.init)(jax.random.key(1))
    (first, second), after = jax.jit(built.train)(model, (images, images + 1), mask)
    assert after == model.batch_stats == {}
    predict = jax.jit(built.predict)
    for view, outputs in ((images, first), (images + 1, second)):
        expected = predict(model, view)
        np.testing.assert_allclose(outputs.logits, expected.logits, rtol=1e-5, atol=1e-6)
    # The same parameters, but another function in training than in evaluation.
    built = network("own_train:Mine")
    (outputs,), _ = jax.jit(built.train)(model, (images,), mask)
    np.testing.assert_allclose(outputs.logits, first.logits, rtol=1e-5, atol=1e-6)
    assert np.abs(outputs.logits - jax.jit(built.predict)(model, images).logits).max() > 1e-3


BATCH_NORM = """
class OfFlax(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(6, (3, 3), name="conv")(images)
        x = nn.BatchNorm(not train, momentum=0.9, bias_init=nn.initializers.ones, name="norm")(x)
        return nn.BatchNorm(not train, momentum=0.9, use_scale=False, use_bias=False, name="end")(x.mean((1, 2)))

class OfLibrary(nn.Module):
    normalisation: str
    @nn.compact
    def __call__(self, images, train=False, mask=None, num_views=1):
        x = nn.Conv(6, (3, 3), name="conv")(images)
        x = Normalisation(self.normalisation, name="norm")(x, train, mask, num_views)
        return Normalisation(self.normalisation, False, name="end")(x.mean((1, 2)), train, mask, num_views)
"""


@pytest.mark.parametrize("policy", ["running", "static"])
def test_batch_normalisation_of_flax_is_that_of_the_library(own_folder, policy):
    """With statistics that leave padding and other views out; without these it is Flax's own."""
    write(own_folder / "own_norms.py", BATCH_NORM)
    flax, library = (network(f"own_norms:{name}", normalisation=policy) for name in ("OfFlax", "OfLibrary"))
    assert flax.normalisation == policy
    images = jax.random.uniform(jax.random.key(0), (5, 8, 8, 1), maxval=255.0)
    model = jax.jit(flax.init)(jax.random.key(1))
    assert (model.params["backbone"]["norm"]["bias"] == 1).all()  # drawn by Flax
    shapes = jax.eval_shape(library.init, jax.random.key(1))
    assert jax.tree.map(jnp.shape, model) == jax.tree.map(jnp.shape, shapes)

    def passes(built, model):
        trained = built.train(model, (images, images + 9), jnp.arange(5) < 3)
        return trained, built.batch_statistics(model, images, jnp.ones(5, bool)), built.input_moments(
            model, images, jnp.ones(5, bool)
        ), built.predict(model, images)  # fmt: skip

    actual, expected = jax.jit(lambda model: [passes(built, model) for built in (flax, library)])(model)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    own = flax.module.backbone.module
    variables = {"params": model.params["backbone"], "batch_stats": model.batch_stats["backbone"]}
    plain = jax.jit(lambda x: own.apply(variables, flax.inputs.to_network(x), True, mutable=["batch_stats"])[0])
    (outputs,), _ = jax.jit(flax.train)(model, (images,), jnp.ones(5, bool))
    np.testing.assert_allclose(outputs.features, plain(images), rtol=1e-3, atol=1e-4)
    for other in ("group", "none"):
        expect_line("own_norms:OfFlax", ["needs model.normalisation 'running' or 'static'"], normalisation=other)


def test_a_backbone_with_a_short_name_of_its_own(own_folder, monkeypatch):
    """As a notebook adds it, whose code lies in no file; it is adapted and checked like one with an import path."""
    notebook = types.ModuleType("own_notebook")
    monkeypatch.setitem(sys.modules, "own_notebook", notebook)
    exec(HEADER + BATCH_NORM, vars(notebook))
    monkeypatch.setitem(BACKBONES, "mine", notebook.OfFlax)
    params, batch_stats = jax.eval_shape(network("mine").init, jax.random.key(0))
    assert params["backbone"]["conv"]["kernel"].shape == (3, 3, 1, 6)
    assert set(batch_stats["backbone"]) == {"norm", "end"}
    expect_line("mine", ["fails to start", "norm needs model.normalisation"], normalisation="group")


def test_factories(own_folder):
    dense = [
        "        x = images.reshape(len(images), -1).astype(self.dtype)",
        "        return nn.Dense(self.width, dtype=self.dtype)(x)",
    ]
    write(
        own_folder / "own_factories.py",
        "class Mine(nn.Module):",
        "    width: int",
        "    dtype: jnp.dtype = jnp.float32",
        "    @nn.compact",
        "    def __call__(self, images):",
        *dense,
        "wide = functools.partial(Mine, width=9)",
        "def function(**keywords):",
        "    assert set(keywords) == {'normalisation', 'dtype'}",
        "    return Mine(4, keywords['dtype'])",
        "nothing = lambda: 3",
    )
    assert network("own_factories:wide").module.backbone.module.width == 9
    assert network("own_factories:function", dtype="bfloat16").module.backbone.module.dtype == jnp.bfloat16
    expect_line("own_factories:Mine", ["cannot be built (TypeError", "width"])
    expect_line("own_factories:nothing", ["gives a int", "flax.linen.Module"])


def expect_line(name, words, **overrides):
    with pytest.raises(UserError) as error:
        network(name, **overrides)
    message = str(error.value)
    assert "\n" not in message and f"model.name={name}" in message, message
    for word in words:
        assert word in message, message


def test_names_that_lead_nowhere(own_folder):
    write(own_folder / "own_module.py", "class Other(nn.Module): pass")
    write(own_folder / "own_broken.py", "x = 1 / 0")
    write(own_folder / "own_import.py", "import own_missing")
    (own_folder / "own_syntax.py").write_text("def f(:\n")
    expect_line("own_module:", ["has no such name"])
    expect_line("own_nowhere:Mine", ["No module named 'own_nowhere'"])
    expect_line("own_nowhere.py:Mine", ["importing own_nowhere.py fails (FileNotFoundError"])
    expect_line("own_module:Mine", [str(own_folder / "own_module.py"), "has no Mine"])
    for name in ("own_broken", "own_broken.py"):
        line = f"importing {name} fails (ZeroDivisionError in line 6 of {own_folder / 'own_broken.py'}"
        expect_line(f"{name}:Mine", [line])
    expect_line("own_import:Mine", ["importing own_import fails", "No module named 'own_missing'"])
    expect_line("own_syntax.py:Mine", ["SyntaxError", "line 1"])


# The lines of a backbone -> what is said of it.
NO_BACKBONES = {
    "feature maps": (
        ["images", "return nn.Conv(4, (3, 3))(images)"],
        ["gives float32 (6, 8, 8, 4) for 6 images", "features [B, F]"],
    ),
    "several outputs": (["images", FLAT, "return nn.Dense(3)(x), x"], ["gives tuple"]),
    "batch normalisation": (
        ["images, train", FLAT, "return nn.BatchNorm(not train)(nn.Dense(3)(x))"],
        ["fails to start", "line 11 of", "BatchNorm_0 needs momentum=0.9, or model.normalisation='static'"],
    ),
    "other batch normalisation": (
        ["images, train", FLAT, "return nn.BatchNorm(False, 0, .9, 1e-3, use_bias=False)(nn.Dense(3)(x))"],
        ["BatchNorm_0 needs use_running_average=not train, epsilon=1e-05, the last axis, both scale and bias"],
    ),
    "batch normalisation in training alone": (
        ["images, train", FLAT, "return nn.BatchNorm(True, momentum=0.9)(nn.Dense(3)(x))"],
        ["fails in training", "BatchNorm_0 needs use_running_average=not train)"],
    ),
    "batch normalisation of several images together": (
        [
            "images, train",
            "x = nn.Dense(3)(images.mean((1, 2))).reshape(len(images) // 3 or 1, -1, 3).mean(1)",
            "return nn.BatchNorm(not train, momentum=0.9)(x).repeat(len(images) // len(x), 0)",
        ],
        ["Normalisation BatchNorm_0", "as the backbone was given them"],
    ),
    "statistics of another layer": (
        ["images, train", FLAT, "self.variable('batch_stats', 'x', jnp.zeros, (3,))", "return nn.Dense(3)(x)"],
        ["keeps batch_stats of , params", "flax.linen.BatchNorm"],
    ),
    "dropout": (
        ["images, train", FLAT, "x = nn.Dense(3)(x)", "return nn.Dropout(0.5, deterministic=not train)(x)"],
        ["fails in training for (8, 8, 1) (InvalidRngError in line 12 of", "own_module.py", "dropout"],
    ),
    "no parameters": (["images", "return images.reshape(len(images), -1)"], ["keeps nothing"]),
    "an argument of another name": (
        ["images, deterministic=True", FLAT, "return nn.Dense(3)(x)"],
        ["gives a Mine that takes (images, deterministic)", "(images, train)"],
    ),
    "too small an image": (
        ["images", "return nn.Dense(3)(images.reshape(len(images), 28 * 28))"],
        ["fails to start for (8, 8, 1) (TypeError in line 10 of"],
    ),
    "another size in evaluation": (
        ["images, train", FLAT, "x = nn.Dense(3)(x)", "return x if train else x[:1]"],
        ["float32 (1, 3) for 6 images"],
    ),
}


@pytest.mark.parametrize("case", NO_BACKBONES)
def test_what_cannot_be_a_backbone(own_folder, case):
    (arguments, *lines), words = NO_BACKBONES[case]
    write(own_folder / "own_module.py", call=[f"def __call__(self, {arguments}):", *lines])
    expect_line("own_module:Mine", words)


@pytest.mark.parametrize(
    "arguments, passed_on",
    [
        ("images, train", "train"),
        ("images, train, mask, num_views", "train, mask"),
        ("images, train, mask, num_views", "train, None, num_views"),
        ("images, train, mask, num_views", "True, mask, num_views"),
    ],
)
def test_normalisation_that_would_mix_views_or_padding(own_folder, arguments, passed_on):
    lines = [f"def __call__(self, {arguments}):", FLAT,
             f"return Normalisation(self.normalisation, name='norm')(nn.Dense(3)(x), {passed_on})"]  # fmt: skip
    write(own_folder / "own_module.py", call=lines, fields=POLICY)
    expect_line("own_module:Mine", ["Normalisation norm", "called with (x, train, mask, num_views)"])
    assert network("own_module:Mine", normalisation="group").normalisation == "group"


def test_normalisation_of_another_policy(own_folder):
    lines = ["def __call__(self, images, train=False, mask=None, num_views=1):", FLAT,
             "return Normalisation('static')(nn.Dense(3)(x), train, mask, num_views)"]  # fmt: skip
    write(own_folder / "own_module.py", call=lines)
    expect_line("own_module:Mine", ["must have the policy", "'running'"])
    expect_line("own_module:Mine", ["takes no keyword dtype"], dtype="bfloat16")


def test_whatever_reads_a_models_name_copes():
    name = "own_package.own_models:Mine"
    config = apply_arguments(base_config(), f"semifl,{name},server_labels=250")
    assert (config.method, config.model.name, config.data.server_labels) == ("semifl", name, 250)
    assert find_machine(make_tiny_config(**{"model.name": name})).lanes(10) == 1
    with pytest.raises(UserError, match=f"known: {', '.join(sorted(BACKBONES))}, or your own"):
        network("nobody")
