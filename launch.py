"""Trains a federated semi-supervised method.

    python launch.py                                             the quickstart: FedAnchor on handwritten digits
    python launch.py --config=configs/fedanchor_cifar10.py --workdir=runs/a
    python launch.py --config=configs/fedanchor_cifar10.py:wrn28_2,anchors=250,alpha=0.1 --config.seed=1
    python launch.py profile --config=configs/fedanchor_cifar10.py --rounds=5

train                       the default: trains, or goes on with a run that was stopped
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

QUICKSTART = pathlib.Path(__file__).parent / "configs" / "quickstart.py"
COMMANDS = {"train": train, "profile": profile}


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit status: 0, 2 for what the user can mend, 3 for failed training."""
    if {"-h", "--help", "help"} & set(argv):
        print(__doc__)
        return 0
    command, argv = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("train", argv)
    own = flags.FlagValues()
    flags.DEFINE_string("config", str(QUICKSTART), "the config file", flag_values=own)
    flags.DEFINE_string("workdir", None, "the run's folder", flag_values=own)
    if command == "profile":
        flags.DEFINE_integer("rounds", 5, "how many are traced", flag_values=own)
    overrides = [word for word in argv if word.startswith("--config.")]
    try:
        words = own(["launch.py", *(word for word in argv if word not in overrides)])
        if len(words) > 1:
            raise UserError(f"cannot make sense of {words[1]!r}; see python launch.py --help")
        others = {"rounds": own.rounds} if command == "profile" else {}
        COMMANDS[command](parse_config(own.config, overrides), workdir=own.workdir, **others)
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
