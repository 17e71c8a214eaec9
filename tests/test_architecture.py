"""Which modules may import which: the layers of the library, read from its files."""

import ast
import pathlib

import pytest

import fedjax_ssl

PACKAGE = pathlib.Path(fedjax_ssl.__file__).parent
NAME = "fedjax_ssl"

# From the bottom up. A room is a folder or a flat file. It may import rooms of lower floors, but no other room of its
# own floor. `fedjax_ssl/__init__.py` is above the library, and the command line above that.
FLOORS = (
    ("base",),
    ("ops",),
    ("data", "models"),
    ("records", "engine"),
    ("report", "client", "server"),
    ("methods",),
    ("config",),
    ("run", "serve"),
    ("sweep", "flower"),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
# Rooms that may import only some of the rooms below them, and which.
KNOWS = {
    "base": (),
    "ops": ("base",),
    "data": ("base", "ops"),
    "models": ("base", "ops"),
    "records": ("base", "data"),
    "report": ("base", "records"),
    "engine": ("base", "ops", "data", "models"),
    "methods": ("base", "ops", "data", "models", "engine", "client", "server"),
}
MOST_FLAT_FILES = 1


def files_of(package):
    """All modules of a package by name; the package itself is `__init__`."""
    return {".".join(path.relative_to(package).with_suffix("").parts): path for path in sorted(package.rglob("*.py"))}


def imports_of(path, module, modules):
    """The library's modules that a file imports, also inside functions, and the other libraries.

    A name from a folder's `__init__` is an import of that file; `from fedjax_ssl.data import arrays` imports the module
    `data.arrays`.
    """
    inside, outside = set(), set()

    def add(name, otherwise=None):
        top, _, rest = name.partition(".")
        if top != NAME:
            outside.add(top)
            return
        for found in (rest, f"{rest}.__init__" if rest else "__init__", otherwise):
            if found in modules:
                inside.add(found)
                return
        raise AssertionError(f"{module} imports {name}, which is not a module")

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            source = ".".join(filter(None, [NAME if node.level else "", *package, node.module or ""]))
            for alias in node.names:
                found = f"{source}.{alias.name}".removeprefix(f"{NAME}.")
                add(f"{source}.{alias.name}" if source.startswith(NAME) and is_module(found, modules) else source)
    return inside - {module}, outside


def is_module(name, modules):
    return name in modules or f"{name}.__init__" in modules


def read(package):
    """{module: modules of the library that it imports}, {module: other libraries}."""
    modules = files_of(package)
    found = {module: imports_of(path, module, modules) for module, path in modules.items()}
    return {module: both[0] for module, both in found.items()}, {module: both[1] for module, both in found.items()}


def room(module):
    return module.partition(".")[0]


def floor(of_room):
    found = [number for number, rooms in enumerate(FLOORS) if of_room in rooms]
    assert found, f"{of_room} stands on no floor; give it a place in FLOORS"
    return found[0]


def circle(imports):
    """A circle of imports as a list of modules, or []."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return path[path.index(module) :] + [module]
        if module in done:
            return []
        path.append(module)
        for other in sorted(imports[module]):
            if found := visit(other):
                return found
        done.add(path.pop())
        return []

    for module in sorted(imports):
        if found := visit(module):
            return found
    return []


def wrong_layers(imports):
    """Imports of rooms on the same floor or above, and of rooms that KNOWS excludes."""
    found = []
    for module, others in imports.items():
        for other in sorted(others):
            here, there = room(module), room(other)
            if here != there and (floor(there) >= floor(here) or there not in KNOWS.get(here, (there,))):
                found.append(f"{module} imports {other}")
    return found


@pytest.fixture(scope="module")
def library():
    return read(PACKAGE)


def test_no_circle(library):
    assert circle(library[0]) == []


def test_imports_go_downwards_only(library):
    assert wrong_layers(library[0]) == []


def test_several_hosts_are_below_the_run(library):
    """The agreement between hosts imports neither the experiment nor the loop."""
    known = {"run.observe.clock", "run.observe.log", "run.signals", "run.under_way"}
    for module, others in library[0].items():
        if module.startswith("run.hosts"):
            assert {o for o in others if room(o) == "run" and not o.startswith("run.hosts")} <= known, module


def test_what_a_run_shows_is_below_training(library):
    for module, others in library[0].items():
        if module.startswith("run.observe"):
            assert not others & {"run.train", "run.seeds"}, module


def test_every_folder_has_a_face_that_says_what_it_is():
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        face = folder / "__init__.py"
        assert face.exists(), f"{folder} has no __init__.py"
        assert ast.get_docstring(ast.parse(face.read_text())), f"{face} has no docstring"


def test_every_room_has_its_tests(root):
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= {path.parent.name for path in (root / "tests").glob("*/test_*.py")}


def test_few_flat_files():
    flat = [path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]
    assert len(flat) <= MOST_FLAT_FILES, flat


def test_nothing_imports_flower(library):
    """The bridge imports it by name in one place, which says what to install."""
    assert not [module for module, others in library[1].items() if "flwr" in others]


def test_what_computes_reads_no_command_line_and_no_disk(library):
    """Methods and the layers below, except data, use no files: they are pure functions of arrays."""
    disk = {"argparse", "orbax", "pathlib", "shutil", "tempfile", "absl", "os", "io"}
    for module, others in library[1].items():
        if room(module) in ("ops", "engine", "client", "server", "methods"):
            assert not others & disk, f"{module} imports {others & disk}"
