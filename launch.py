"""Trains a federated semi-supervised method.

    python launch.py                                             the quickstart: FedAnchor on handwritten digits
    python launch.py --config=configs/fedanchor_cifar10.py --workdir=runs/a
    python launch.py --config=configs/fedanchor_cifar10.py:wrn28_2,anchors=250,alpha=0.1 --config.seed=1
    python launch.py --config=configs/fedanchor_mnist.py:semifl,strong                    another method, a recipe
    python launch.py sweep configs/sweeps/mnist_methods.py --workdir=runs/mnist_methods
    python launch.py profile --config=configs/fedanchor_cifar10.py --rounds=5

train                       the default: trains, or goes on with a run that was stopped
sweep FILE                  runs what a file in configs/sweeps/ lists, into one table; goes on where it was stopped;
                            --dry_run lists the runs; --config.FIELD=VALUE then holds for all of them
profile                     traces --rounds=5 rounds and says where their time goes

--config=FILE[:ARGUMENTS]   what to run; see configs/
--config.FIELD=VALUE        overrides any field; see fedjax_ssl/config.py
--workdir=FOLDER            where results go, and where a run that was stopped goes on; default: a fresh one under runs/
"""

import pathlib
import sys

from absl import flags

from fedjax_ssl import train
from fedjax_ssl.command_line import parse_config
from fedjax_ssl.errors import TrainingError, UserError
from fedjax_ssl.profiling import profile
from fedjax_ssl.sweep import run_sweep

QUICKSTART = pathlib.Path(__file__).parent / "configs" / "quickstart.py"
COMMANDS = ("train", "sweep", "profile")


def run(command: str, words: list[str]) -> None:
    """Carries one command out."""
    own = flags.FlagValues()
    flags.DEFINE_string("config", str(QUICKSTART), "the config file", flag_values=own)
    flags.DEFINE_string("workdir", None, "the run's folder", flag_values=own)
    if command == "profile":
        flags.DEFINE_integer("rounds", 5, "how many are traced", flag_values=own)
    if command == "sweep":
        flags.DEFINE_bool("dry_run", False, "list the runs and do nothing", flag_values=own)
    overrides = [word for word in words if word.startswith("--config.")]
    files = own(["launch.py", *(word for word in words if word not in overrides)])[1:]
    if len(files) > (command == "sweep"):
        raise UserError(f"cannot make sense of {files[-1]!r}; see python launch.py --help")
    if command == "sweep":
        if not files:
            raise UserError("which sweep? python launch.py sweep FILE --workdir=FOLDER")
        run_sweep(files[0], own.workdir, overrides, own.dry_run)
    elif command == "profile":
        profile(parse_config(own.config, overrides), own.rounds, own.workdir)
    else:
        train(parse_config(own.config, overrides), own.workdir)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status: 0, 2 for what the user can mend, 3 for failed training."""
    if {"-h", "--help", "help"} & set(argv):
        print(__doc__)
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
