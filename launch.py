"""The command line: `python launch.py --help` says what it takes."""

import pathlib
import sys
from typing import Any

from absl import flags

from fedjax_ssl.cli import help
from fedjax_ssl.cli.help import Command
from fedjax_ssl.errors import TrainingError, UserError, nearest

QUICKSTART = pathlib.Path(__file__).parent / "configs" / "quickstart.py"


# Each command imports what it needs: most of it takes seconds, and help needs none of it.
def run_train(own: Any, words: list[str], overrides: list[str]) -> None:
    """Trains, or resumes a run that was stopped; the default.

    The workdir gets config.json, partition.npz, metrics.jsonl (a line a round),
    timings.jsonl, checkpoints/, tensorboard/ and at the end summary.json and
    report.html. The same command with the same --workdir resumes from the last
    checkpoint. Several seeds, each in its own folder: --config.seeds='(0, 1, 2)'.

    Watch it with: tensorboard --logdir=runs
    """
    from fedjax_ssl import train
    from fedjax_ssl.cli.parse import parse_config

    train(parse_config(own.config, overrides), own.workdir)


def run_sweep(own: Any, words: list[str], overrides: list[str]) -> None:
    """Runs what a file in configs/sweeps/ lists, into one table.

    Some take a data set: configs/sweeps/fedanchor_table1.py:svhn. The table is
    WORKDIR/table.md, .csv and .tex, and grows as runs finish; at the end
    WORKDIR/report.html shows them all. Started again, a sweep skips finished
    runs and resumes the others; the same command may run several times at once.
    --config.FIELD=VALUE holds for all runs, so FIELD must not be one in which
    they differ.
    """
    from fedjax_ssl import sweep

    sweep.run_sweep(words[0], own.workdir, overrides, own.dry_run)


def run_profile(own: Any, words: list[str], overrides: list[str]) -> None:
    """Traces a few rounds and says where their time goes.

    The workdir, a fresh one, gets trace/, profile.json and profile.txt.
    """
    from fedjax_ssl.cli.parse import parse_config
    from fedjax_ssl.run.profiling import profile

    profile(parse_config(own.config, overrides), own.rounds, own.workdir)


def run_report(own: Any, words: list[str], overrides: list[str]) -> None:
    """Writes what runs show: pictures, a page, a table.

    One run gets WORKDIR/report.html, figures/ and MODEL_CARD.md, as it does by
    itself when it is over. Several runs, or a folder of them, go into one page,
    with the table as CSV, Markdown and LaTeX: --out=compare.html. Runs that
    differ in nothing but the seed are one curve with a band.
    """
    from fedjax_ssl.report import report

    print(report(words, own.out, own.target, own.against))


def run_predict(own: Any, words: list[str], overrides: list[str]) -> None:
    """Classifies the images of a file by a run's model.

    The output gets labels [B], probabilities [B, C] and embeddings [B, D].
    """
    from fedjax_ssl.predictor import predict_file

    prediction = predict_file(own.workdir, own.npz, own.out, own.key, own.allow_code)
    print(f"{own.out}: {len(prediction.labels)} images")


CONFIG = {"config": (str(QUICKSTART), "FILE or FILE:ARGUMENTS, what to run; default: configs/quickstart.py")}
WORKDIR = {"workdir": (None, "where results go; default: a fresh folder under runs/")}
COMMANDS = {
    "train": Command(run_train, {**CONFIG, **WORKDIR}),
    "sweep": Command(
        run_sweep,
        {"workdir": (None, "of the whole sweep"), "dry_run": (False, "lists the runs and does nothing")},
        "FILE[:DATASET]",
    ),
    "report": Command(
        run_report,
        {
            "out": (None, "NAME.html, for several runs"),
            "target": ("0.9", "accuracy to which rounds are counted"),
            "against": (None, "runs of one configuration, to take paired differences from"),
        },
        "RUN...",
    ),
    "predict": Command(
        run_predict,
        {
            "workdir": (None, "of the run"),
            "npz": (None, "the file with the images, uint8 [B, H, W, C]"),
            "out": (None, "the npz file to be written"),
            "key": ("", "the images' name in the file; by default images, x or x_test"),
            "allow_code": (False, "runs a method's or a backbone's file that the run names: if you trust it"),
        },
    ),
    "profile": Command(run_profile, {**CONFIG, **WORKDIR, "rounds": (5, "how many are traced")}),
}


def run(command: str, words: list[str]) -> None:
    """Carries one command out."""
    own = flags.FlagValues()
    for name, (default, meaning) in COMMANDS[command].flags.items():
        define = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer}.get(type(default), flags.DEFINE_string)
        define(name, default, meaning, flag_values=own)
    overrides = [word for word in words if word.startswith("--config.")]
    words = own(["launch.py", *(word for word in words if word not in overrides)])[1:]
    if not COMMANDS[command].fits(words):
        names, see = COMMANDS[command].words, f"see python launch.py {command} --help"
        if len(words) < len(names.split()):
            raise UserError(f"which {command}? python launch.py {command} {names}; {see}")
        word = words[-1]
        meant = f"; a config is given as --config={word}" if ".py" in word else nearest(word, COMMANDS)
        raise UserError(f"cannot make sense of {word!r}{meant}; {see}")
    COMMANDS[command].run(own, words, overrides)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status: 0, 2 for what the user can mend, 3 for failed training."""
    if {"-h", "--help", "help"} & set(argv):
        command = next((word for word in argv if word in COMMANDS), None)
        print(help.of_command(command, COMMANDS[command]) if command else help.overview(COMMANDS))
        return 0
    command, words = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    try:
        run(command, words)
    except (UserError, flags.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"training failed: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted; the same command with the same --workdir goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
