"""Runs the command line, alone or as one of several processes that train together, with a planned event.

python hosts_process.py WHAT ARGUMENTS: WHAT is ROUND:SIGNAL, a signal that the process sends itself after so many
rounds, just after the hosts agreed that none has one; `no_data`: reading the data fails; `other_program`: a program
differs from other hosts'; or `nothing`.
"""

import os
import sys

from fedjax_ssl import UserError
from fedjax_ssl.__main__ import enter
from fedjax_ssl.run import features, programs
from fedjax_ssl.run.hosts import link
from fedjax_ssl.run.observe import listeners


def main(what: str) -> int:
    link.BEAT_SECONDS, link.SILENCE_SECONDS = 0.5, 4.0  # so that killed processes are noticed soon
    if what == "no_data":

        def load_dataset(config, tell):
            raise UserError("the data are not here")

        features.load_dataset = load_dataset
    elif what == "other_program":
        programs.DISPATCH_CAPACITY += 1
    elif what != "nothing":
        number, signal = map(int, what.split(":"))
        take = listeners.HearSignals.take

        def take_signal(self, turn):
            take(self, turn)
            if turn.done == number:
                os.kill(os.getpid(), signal)
                while self._signals.received is None:  # it comes through another thread
                    pass

        listeners.HearSignals.take = take_signal
    return enter()


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1)))
