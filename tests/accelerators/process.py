"""Compiles tiny rounds for a target of benchmarks/accelerators.py in a process of its own, which the compiler may
crash.

python -m tests.accelerators.process TARGET CHIPS answers each line of JSON, a program, with a line of JSON.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from tests.helpers.runs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import accelerators


class Compiler:
    """A compiling process, restarted after a crash. A context manager.

    Args:
        target: of `accelerators.TARGETS`.
        chips: their number.
    """

    def __init__(self, target: str, chips: int):
        self._words = [target, str(chips)]
        self._process = None

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory()
        self._errors = open(pathlib.Path(self._folder.name) / "errors", "w+")
        self._environment = {**os.environ, **accelerators.environment(self._words[0], self._folder.name)}
        self._environment.pop("XLA_FLAGS", None)  # the tests' flags are for a CPU
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
        self._errors.close()
        self._folder.cleanup()

    def __call__(self, **program) -> dict:
        """Returns what `accelerators.describe` says about a program.

        Args:
            program: method, variant, labels, model, part and lanes.

        Raises:
            AssertionError: it does not compile.
        """
        if self._process is None:
            command = [sys.executable, "-m", "tests.accelerators.process", *self._words]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
            self._process = subprocess.Popen(command, text=True, cwd=ROOT, env=self._environment, **pipes)
        print(json.dumps(program), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            status, self._process = self._process.wait(), None
            self._errors.seek(0)
            why = signal.strsignal(-status) if status < 0 else "".join(self._errors.readlines()[-3:])
            raise AssertionError(f"{program} ended the compiler: {why}")
        return json.loads(answer)


def is_number(value) -> bool:
    """Whether a field's value is a number; such fields change only a program's constants."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# A paper's values do not fit into a tiny run.
FEDERATION = ("num_clients", "clients_per_round", "data.partition", "data.alpha", "data.num_labelled",
              "data.labelled_share")  # fmt: skip


def tiny_experiment(method: str, variant: str, labels: str, model: str):
    """A tiny run without augmentations, which all methods share; keeps a variant's fields, except numbers."""
    from fedjax_ssl.data import server_has_labels
    from fedjax_ssl.methods import METHODS
    from tests.helpers.tiny_methods import build, make_config

    config, entry = make_config(method, labels, tiny=not variant), METHODS[method]
    config.model.name = tiny = model or config.model.name
    if variant:
        fields = {field: value for field, value in entry.variants[variant].items() if field not in FEDERATION}
        numbers = {field: value for field, value in entry.tiny.items() if is_number(value)}
        config.update_from_flattened_dict({**fields, **numbers})
    if config.model.name == "lenet":
        config.model.name = tiny  # a tiny run's images are too small for it
    if method == "fixmatch" and not server_has_labels(config.data):
        config.fixmatch.server = "alternate"  # a server in parallel needs labels
    return build(config)


def main(target: str, chips: int) -> None:
    from fedjax_ssl.base.devices import use_platform

    for line in sys.stdin:
        program = json.loads(line)
        part, lanes = program.pop("part"), program.pop("lanes")
        with use_platform(accelerators.TARGETS[target].platform):
            experiment = tiny_experiment(**program)
        compiled = accelerators.lower(part, target, chips, lanes, experiment).compile()
        print(json.dumps(accelerators.describe(compiled, target, lanes, experiment.data.inputs)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
