"""The commands: what `python launch.py`, `fedjax-ssl` and `python -m fedjax_ssl` do, and their exit statuses."""

import contextlib
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any

from absl import flags

from fedjax_ssl.base.errors import StoppedError, TrainingError, UserError, nearest, outside_reason, shortened
from fedjax_ssl.base.files import CONFIGS, expanded, replace_file
from fedjax_ssl.base.imports import own_error
from fedjax_ssl.cli import help
from fedjax_ssl.cli.help import Command
from fedjax_ssl.run.observe import log
from fedjax_ssl.run.observe.clock import doing
from fedjax_ssl.run.under_way import resume_command

QUICKSTART = CONFIGS / "quickstart.py"


# Each command imports what it needs, because most imports take seconds, and help needs none of them.
def run_train(own: Any, words: list[str], overrides: list[str]) -> None:
    """Trains, or resumes a stopped run; the default command.

    The workdir gets config.json, metrics.jsonl (one line per round), checkpoints/
    and at the end summary.json and report.html. --workdir=RUN without --config
    resumes RUN from its last checkpoint, with its own config.json.

    Several seeds: --config.seeds='(0, 1, 2)'. Watch: tensorboard --logdir=runs
    """
    with doing("loading JAX"):
        from fedjax_ssl import train
        from fedjax_ssl.config import overlooked, override, parse_config
        from fedjax_ssl.methods import find_method
        from fedjax_ssl.run import hosts
        from fedjax_ssl.run.cores import use_every_core
        from fedjax_ssl.run.dry_run import dry_run
        from fedjax_ssl.run.resuming import saved_config
        from fedjax_ssl.run.validation import validate

    def find_config() -> Any:
        if own.workdir and not own.config and (saved := saved_config(own.workdir, own.allow_code)):
            return override(saved, overrides)
        return parse_config(own.config or str(QUICKSTART), overrides, own.allow_code)

    if own.dry_run:
        config = find_config()
        print(dry_run(config))
        for line in filter(None, (*overlooked(config, overrides), find_method(config.method).advice(config))):
            log.warn(line)
        return
    with hosts.joined(own.coordinator, own.num_processes, own.process_id):
        # A workdir without --config is read by the first process only.
        config = hosts.config_of_first(find_config, own.allow_code, bool(own.config) or not own.workdir)
        if hosts.is_first() and (warnings := overlooked(config, overrides)):
            validate(config)  # mistakes come first, and alone
            for line in warnings:
                log.warn(line)
        use_every_core(config)
        train(config, own.workdir)


def run_sweep(own: Any, words: list[str], overrides: list[str]) -> None:
    """Trains the runs that a file in configs/sweeps/ lists; makes one table.

    Some files take a data set: configs/sweeps/fedanchor_table1.py:svhn. The table
    (WORKDIR/table.md, .csv and .tex) and table_runs.csv, with one line per run,
    grow as runs finish; at the end WORKDIR/report.html shows all of them. Started
    again, a sweep skips finished runs and resumes the others. The same command
    may run in several processes at once.
    --config.FIELD=VALUE sets a field for all runs; rows must not differ in it.
    --tries=N first searches each row's fields at random, N times, over the file's
    `search`, and runs the row with the best ones.
    --together=N trains up to N rows or tries in one program, if they differ in
    numbers alone, such as learning rates.
    """
    with doing("loading JAX"):
        from fedjax_ssl import sweep
        from fedjax_ssl.run.cores import use_every_core

    use_every_core()
    sweep.run_sweep(words[0], own.workdir, overrides, own.dry_run, own.rows, own.tries, own.together)


def run_profile(own: Any, words: list[str], overrides: list[str]) -> None:
    """Measures where the time of a round goes.

    A new workdir gets trace/, profile.json and profile.txt.
    """
    with doing("loading JAX"):
        from fedjax_ssl.config import parse_config
        from fedjax_ssl.run.cores import use_every_core
        from fedjax_ssl.run.observe.profiling import profile

    config = parse_config(own.config or str(QUICKSTART), overrides)
    use_every_core(config)
    profile(config, own.rounds, own.workdir)


def run_report(own: Any, words: list[str], overrides: list[str]) -> None:
    """Writes the report of runs: figures, a page, a table.

    One run gets WORKDIR/report.html, figures/ and MODEL_CARD.md, as at the end of
    training. Several runs, or a folder of runs, are compared on one page, with a
    table as CSV, Markdown and LaTeX: --out=compare.html. Runs that only differ in
    the seed are one curve with a band.
    """
    with doing("loading what draws the report"):
        from fedjax_ssl.report import report
        from fedjax_ssl.report.look import Look

    columns = tuple(name.strip() for name in (own.columns or "").split(",") if name.strip())
    look = Look(columns, own.interval, own.caption or "", own.label or "")
    with doing("drawing the report"):
        page = report(words, own.out, own.target, own.against, look, own.figures)
    print(page)


def run_predict(own: Any, words: list[str], overrides: list[str]) -> None:
    """Classifies images, rows or texts in a file or a folder with a run's model.

    --out=NAME.csv gets one line for each; an npz file gets labels [B], classes
    [B], probabilities [B, C], embeddings [B, D] and class_names [C]. If the input
    has labels (labels, y or y_test in the npz, FOLDER/CLASS/IMAGE, the csv's
    label column), the accuracy is printed.
    """
    with doing("loading JAX"):
        from fedjax_ssl.serve.judging import in_words
        from fedjax_ssl.serve.predictor import predict_file

    with doing("compiling and predicting"):
        found = predict_file(
            own.workdir, own.out, own.npz, own.images, own.key, own.allow_code, own.csv, own.checkpoint
        )
    what = "images" if found.of_images else "rows"
    print(f"{own.out}: {len(found.prediction.labels)} {what}")
    if found.accuracy is not None:
        print(f"accuracy {100 * found.accuracy:.2f} % of {found.labelled} {what} with a label")
        prediction = found.prediction
        print(in_words(found.true_labels, prediction.labels, prediction.probabilities, found.class_names))
    if found.in_training:
        print(f"{found.in_training} of the {what} are in the training set: their accuracy says nothing of new ones")


def run_export(own: Any, words: list[str], overrides: list[str]) -> None:
    """Exports a run's model.

    safetensors has the parameters; stablehlo and onnx have the whole program from
    pixels to probabilities. hub is a folder for the Hugging Face Hub with
    safetensors, stablehlo and a model card. onnx needs
    pip install 'fedjax_ssl[onnx]'.
    """
    with doing("loading JAX"):
        from fedjax_ssl.serve.export import export_run

    with doing("exporting"):
        print(export_run(words[0], own.out, own.format, own.allow_code, own.license, own.checkpoint))


def run_methods(own: Any, words: list[str], overrides: list[str]) -> None:
    """Lists the methods, where each takes labels (data.labels), and its variants."""
    with doing("loading JAX"):
        from fedjax_ssl.methods import METHODS, NAMES

    rows = [("method", "labels", "variants")]
    rows += [(name, ", ".join(METHODS[name].settings), ", ".join(METHODS[name].variants)) for name in NAMES]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    print("\n".join(f"{name:{first}}  {labels:{second}}  {variants}".rstrip() for name, labels, variants in rows))


def run_convert_weights(own: Any, words: list[str], overrides: list[str]) -> None:
    """Converts PyTorch weights of a pretrained encoder to a file for encoder.weights.

    A .safetensors file is read directly. A .pth file is read by PyTorch in a
    separate process, which only loads tensors and runs no code. Encoders:
    docs/how_to/pretrained_encoders.md.
    """
    with doing("loading JAX"):
        from fedjax_ssl.models.encoders import convert

    with doing("converting"):
        number = convert(expanded(words[0]), own.encoder, pathlib.Path(own.out))
    print(f"{own.out}: {number} arrays")


CHECKPOINT = {"checkpoint": ("newest", "newest; or best, by the run's validation images")}
CONFIG = {"config": (None, "FILE or FILE:ARGUMENTS, or a run's config.json; default: configs/quickstart.py")}
WORKDIR = {"workdir": (None, "folder for results; default: a new one under runs/")}
COMMANDS = {
    "train": Command(
        run_train,
        {
            **CONFIG,
            **WORKDIR,
            "dry_run": (False, "only shows the configuration and the size of a round"),
            "allow_code": (False, "lets a config.json run code that it names as FILE.py:NAME"),
            "coordinator": (None, "HOST:PORT of the first process, for training on several hosts"),
            "num_processes": (None, "number of processes; SLURM and TPU pods set all three by themselves"),
            "process_id": (None, "number of this process, from 0; docs/how_to/hosts.md"),
        },
    ),
    "sweep": Command(
        run_sweep,
        {
            "workdir": (None, "folder of the whole sweep"),
            "dry_run": (False, "only lists the runs"),
            "rows": ("*", "only these rows, such as 'FedAvg;FedProx*'"),
            "tries": (0, "random tries per row, judged on validation images"),
            "together": (1, "rows or tries in one program, if they differ in numbers alone"),
        },
        "FILE[:DATASET]",
        ("workdir",),
    ),
    "report": Command(
        run_report,
        {
            "out": (None, "NAME.html, for several runs"),
            "target": (0.9, "count the rounds until this accuracy is reached"),
            "against": (None, "runs of one configuration, for paired differences"),
            "columns": (None, "columns of the table, such as 'method,test accuracy'; the CSV has all"),
            "interval": (False, "show mean ± half the 95 % confidence interval instead of the deviation"),
            "caption": (None, "caption of the LaTeX table, written in LaTeX"),
            "label": (None, "label of the LaTeX table, such as 'tab:mnist'"),
            "figures": ("screen", "column or page: width of the figures in a paper"),
        },
        "RUN...",
    ),
    "predict": Command(
        run_predict,
        {
            "workdir": (None, "folder of the run"),
            "npz": (None, "file with images, uint8 [B, H, W, C]"),
            "images": (None, "folder with images, FOLDER/IMAGE or FOLDER/CLASS/IMAGE"),
            "csv": (None, "csv or parquet file, for a model of tables or texts"),
            "out": (None, "output file, NAME.csv or NAME.npz"),
            **CHECKPOINT,
            "key": ("", "name of the images in the npz; by default images, x, x_test or test_images"),
            "allow_code": (False, "lets the run's own method or backbone FILE.py run: only if you trust it"),
        },
    ),
    "export": Command(
        run_export,
        {
            "format": (None, "safetensors, stablehlo, onnx or hub"),
            "out": (None, "output file; for hub a folder"),
            **CHECKPOINT,
            "license": ("unknown", "license in the model card of hub, such as apache-2.0"),
            "allow_code": (False, "lets the run's own method or backbone FILE.py run: only if you trust it"),
        },
        "RUN",
        ("format", "out"),
    ),
    "convert-weights": Command(
        run_convert_weights,
        {"encoder": (None, "the encoder, such as efficientnet_lite0"), "out": (None, "output file, NAME.safetensors")},
        "FILE",
        ("encoder", "out"),
    ),
    "methods": Command(run_methods, {}),
    "profile": Command(run_profile, {**CONFIG, **WORKDIR, "rounds": (5, "number of traced rounds")}),
}


PATHS = ("workdir", "out", "against", "npz", "images", "csv")
LEVELS = {"--quiet": log.QUIET, "--verbose": log.VERBOSE}
AGAIN = {"sweep": "resumes the sweep", "report": "draws the report anew", "profile": "measures anew"}


def run(command: str, words: list[str]) -> None:
    """Runs one command."""
    takes, own = COMMANDS[command], flags.FlagValues()
    for name, (default, meaning) in takes.flags.items():
        kinds: Mapping[type, Any] = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, float: flags.DEFINE_float}
        kinds.get(type(default), flags.DEFINE_string)(name, default, meaning, flag_values=own)
    overrides = [word for word in words if word.startswith("--config.")]
    if overrides and command != "sweep" and "config" not in takes.flags:
        raise UserError(f"{overrides[0]}: {command} takes no fields of a configuration")
    words = own(["launch.py", *(word for word in words if word not in overrides)])[1:]
    for name in takes.flags:
        if own[name].present and own[name].value == "":  # such as from an unset shell variable
            raise UserError(f"--{name} is empty; leave it out, or give it a value")
        if name in PATHS and own[name].value:  # a shell leaves the ~ of --workdir=~/runs as it is
            own[name].value = str(expanded(own[name].value))
    number, see = len(takes.words.split()), f"see python launch.py {command} --help"
    if len(words) < number:
        raise UserError(f"which {command}? python launch.py {command} {takes.words}; {see}")
    if len(words) > number and not takes.words.endswith("..."):
        word = next((word for word in words if word in COMMANDS), words[-1])
        meant = f"; a config is given as --config={word}" if ".py" in word else nearest(word, COMMANDS)
        meant = "; a command is the first word" if word in COMMANDS else meant
        raise UserError(f"cannot make sense of {word!r}{meant}; {see}")
    if lacking := [f"--{name} ({takes.flags[name][1]})" for name in takes.needs if own[name].value is None]:
        raise UserError(f"{command} needs {', '.join(lacking)}")
    takes.run(own, words, overrides)


def main(argv: list[str], program: str = "python launch.py") -> int:
    """Runs the command line: the words after the program's name. Messages name `program`, the command that started it.

    Returns the exit status: 0; 2 for an error that the user can fix, before a run began; 3 for failed training; 4 for a
    run that something outside ended and that can be resumed; 130 and 143 after SIGINT and SIGTERM. Any other error is a
    bug of the library, and is raised; not one of a user's code, which is told in a line.
    """

    def say(text: str) -> None:
        log.show(text.replace("python launch.py", program))

    command, words = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    try:
        log.set_level(next((LEVELS[word] for word in reversed(words) if word in LEVELS), log.NORMAL))
        words = [word for word in words if word not in LEVELS]
        if argv == ["--version"]:
            import fedjax_ssl

            print(f"fedjax_ssl {fedjax_ssl.__version__}", flush=True)
        elif {"-h", "--help", "help"} & set(argv):
            named = next((word for word in argv if word in COMMANDS), None)
            text = help.of_command(named, COMMANDS[named]) if named else help.overview(COMMANDS)
            print(text.replace("python launch.py", program), flush=True)
        else:
            run(command, words)
    except (UserError, flags.Error) as error:
        say(f"error: {shortened(str(error))}")
        return 2
    except TrainingError as error:
        say(f"training failed: {error}")
        return 3
    except StoppedError as error:
        say(f"stopped: {error} (details: {write_log(error, error.folder)})")
        return 4
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at exit
        return 128 + 13  # as if SIGPIPE had ended it
    except (KeyboardInterrupt, SystemExit) as error:
        say(f"stopped; {farewell(argv)}")
        return 130 if isinstance(error, KeyboardInterrupt) else int(error.code or 0)
    except Exception as error:
        reason = own_error(error) or outside_reason(error)
        if reason is None:
            raise
        say(f"error: {reason} (details: {write_log(error)})")
        return 2
    return 0


def farewell(argv: list[str]) -> str:
    """What an interrupted command leaves behind, and how to resume it."""
    if argv[:1] and argv[0] in AGAIN:
        return f"the same command {AGAIN[argv[0]]}"
    hosts = sys.modules.get("fedjax_ssl.run.hosts")
    if hasattr(hosts, "is_first") and not hosts.is_first():
        return "host 0 says what is left"
    command = resume_command()
    return f"{command} resumes the run" if command else "nothing has been written or changed"


def write_log(error: BaseException, folder: pathlib.Path | None = None) -> pathlib.Path | str:
    """Writes an error's traceback to FOLDER/error.log, or else to the folder for temporary files.

    Returns the file's path, or a text if no file could be written.
    """
    paths = [folder.absolute() / "error.log"] if folder else []
    for path in (*paths, pathlib.Path(tempfile.gettempdir()) / f"fedjax_ssl-error-{os.getpid()}.log"):
        with contextlib.suppress(OSError):
            replace_file(path, "".join(traceback.format_exception(error)))
            return path
    return "no log could be written"
