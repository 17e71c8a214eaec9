"""Training at the server only, the lower bound: the server trains on its labelled images.

With `data.centralised` the server holds every image of the federation with its label, and this is the centralised,
fully supervised bound (SemiFL's "Fully Supervised", FedIL's "Fully-Supervised").
"""

from fedjax_ssl.engine import Method, Problem
from fedjax_ssl.methods.entry import Entry, Variants
from fedjax_ssl.methods.frames import alternating

VARIANTS: Variants = {"no_pretraining": {"server.pretrain_epochs": 0}}


def server_only(problem: Problem) -> Method:
    """A Method without clients: `server.epochs` of cross-entropy in each round."""
    return alternating(problem, ())


ENTRY = Entry(
    server_only,
    title="the server's training alone",
    variants=VARIANTS,
    confidence=(),
    unlabelled=False,
    not_with_flower="has no clients",
)
