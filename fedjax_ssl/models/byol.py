"""The heads of BYOL: a projector on the features and a predictor on the projector's outputs, one hidden layer each."""

import functools

from fedjax_ssl.models.projectors import Projector


def _head(reads: str, model) -> functools.partial[Projector]:
    widths = model.projector_hidden, model.projector_dim
    return functools.partial(Projector, *widths, model.normalisation, reads=reads)


# Name -> function from the section `config.model` to the head's factory, as in `Entry.heads`.
BYOL_HEADS = {"projector": functools.partial(_head, ""), "predictor": functools.partial(_head, "projector")}
