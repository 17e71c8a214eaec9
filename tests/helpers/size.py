"""Counts how large the library is: lines, fields, refusals, rooms, words, and what a reader of a step opens."""

import ast
import collections
import functools
import io
import subprocess
import sys
import tokenize

from tests.helpers.runs import ROOT
from tests.test_architecture import NAME, read
from tests.test_architecture import room as top_room

HELD = ROOT / "tests" / "size.json"  # the numbers that were reached
OWN_ROOMS = ("run.hosts", "run.observe")  # folders of a folder that are rooms of their own
GENERATED = ("claims.md", "leaderboard.md", "official_code.md")  # in docs/, not written by hand
# What a reader of one client step may leave out: views, layers, the server, lanes, ranges and the frame of a round.
LEFT_OUT = (
    "augment", "ops.augment", "base", "errors", "sections", "fields", "methods.entry", "methods.frames", "server",
    "engine.cohort", "engine.lanes", "models",
)  # fmt: skip
# The fields of a configuration with the sections of all methods.
COUNT_FIELDS = """
from fedjax_ssl import base_config
from fedjax_ssl.config import flatten
from fedjax_ssl.methods import METHODS
print(len(flatten(base_config())), *METHODS)
"""


def inside(module, parts):
    """Whether a module is one of these parts of the package or in one."""
    return any(module == part or module.startswith(f"{part}.") for part in parts)


def room(module):
    return next((own for own in OWN_ROOMS if inside(module, [own])), top_room(module))


def lines_in(folder, kinds=("py",)):
    files = [file for kind in kinds for file in folder.rglob(f"*.{kind}")]
    return sum(len(file.read_text().splitlines()) for file in files)


def code_lines(text):
    """The number of lines with code: no blank line, comment, docstring or import."""
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    counted, left_out = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            counted.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    return len(counted - left_out)


def floors_of(imports):
    """The longest chain of rooms of which each imports the next; a folder's own rooms count as that folder."""
    below = collections.defaultdict(set)
    for module, others in imports.items():
        below[top_room(module)] |= {top_room(other) for other in others} - {top_room(module)}

    @functools.cache
    def height(of_room):
        return 1 + max(map(height, below[of_room]), default=0)

    return 1 + max(map(height, list(below)))  # launch.py is above all


def words_of(root):
    pages = {root / "README.md", *(root / "docs").rglob("*.md")} - {root / "docs" / name for name in GENERATED}
    return sum(len(page.read_text().split()) for page in pages)


class Source:
    """The definitions of a package and where each name in them leads."""

    def __init__(self, package):
        files = {".".join(file.relative_to(package).with_suffix("").parts): file for file in package.rglob("*.py")}
        self.trees = {name.removesuffix(".__init__"): ast.parse(file.read_text()) for name, file in files.items()}
        kinds = ast.FunctionDef | ast.ClassDef
        self.defined = {
            module: {node.name: node for node in tree.body if isinstance(node, kinds)}
            for module, tree in self.trees.items()
        }
        self.imported = {module: dict(self._names(tree)) for module, tree in self.trees.items()}

    def _names(self, tree):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{NAME}."):
                source = node.module.removeprefix(f"{NAME}.")
                for alias in node.names:
                    full = f"{source}.{alias.name}"
                    yield alias.asname or alias.name, (full, None) if full in self.trees else (source, alias.name)

    def resolve(self, module, name, depth=0):
        """(module, name) of the definition of a name; None if the package has none."""
        if name in self.defined[module]:
            return module, name
        source, original = self.imported[module].get(name, (None, None))
        return self.resolve(source, original, depth + 1) if original and source in self.trees and depth < 7 else None

    @functools.cache  # noqa: B019, a Source is made once
    def references(self, module, name):
        """The definitions to which the names in a definition lead."""
        return {found for found in self._references(module, self.defined[module][name]) if found}

    def _references(self, module, node):
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                yield self.resolve(module, part.id)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                source, original = self.imported[module].get(part.value.id, (None, None))
                if source in self.trees and original is None:
                    yield self.resolve(source, part.attr)

    def step_of(self, method):
        """{(module, name): lines} of what a method's file or folder defines, what that refers to, and so on."""
        start = [module for module in self.trees if inside(module, [f"methods.{method}"])]
        todo, seen = [(module, name) for module in start for name in self.defined[module]], {}
        while todo:
            module, name = todo.pop()
            if (module, name) not in seen and not inside(module, LEFT_OUT):
                node = self.defined[module][name]
                seen[module, name] = node.end_lineno - node.lineno + 1
                todo += self.references(module, name)
        return seen


def measure(root=ROOT):
    """All numbers of a checkout, by name; 'lines by room' is a dict of its own."""
    package = root / NAME
    imports, _ = read(package)
    texts = {".".join(file.relative_to(package).parts): file.read_text() for file in sorted(package.rglob("*.py"))}
    by_room = collections.Counter()
    for name, text in texts.items():
        by_room[room(name.removesuffix(".py"))] += len(text.splitlines())
    arrows = {(room(module), room(other)) for module, others in imports.items() for other in others}
    counted = subprocess.run([sys.executable, "-c", COUNT_FIELDS], cwd=root, capture_output=True, text=True, check=True)
    fields, *methods = counted.stdout.split()
    source = Source(package)
    steps = {name: source.step_of(name) for name in methods}
    costs = {name: (len({module for module, _ in step}), len(step), sum(step.values())) for name, step in steps.items()}
    middle = [sorted(column)[len(methods) // 2] for column in zip(*costs.values())]
    # A method's factory holds its stages as inner functions.
    nodes = [node for module, tree in source.trees.items() if room(module) != "methods" for node in ast.walk(tree)]
    functions = [node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef)]
    return {
        **{f"fixmatch: {what}": number for what, number in zip(("files", "definitions", "lines"), costs["fixmatch"])},
        **{f"median of methods: {what}": number for what, number in zip(("files", "definitions", "lines"), middle)},
        "package: lines": sum(by_room.values()),
        "rooms": 1 + len({room(module) for module in imports}),  # with launch.py
        "floors": floors_of(imports),
        "arrows": sum(one != other for one, other in arrows),
        "fields": int(fields),
        "raise UserError": sum(text.count("raise UserError") for text in texts.values()),
        "tests: lines": lines_in(root / "tests"),
        "benchmarks: lines": lines_in(root / "benchmarks"),
        "words by hand": words_of(root),
        **{f"function {number}": size for number, size in enumerate(sorted(functions)[:-4:-1], start=1)},
        "lines by room": dict(sorted(by_room.items())),
    }
