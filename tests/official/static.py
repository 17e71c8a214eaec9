"""Static batch normalisation, as SemiFL and (FL)^2 have it: no statistics in training, and a pass for those of tests.

diaoenmao/SemiFL...@4ec3663: src/data.py:238-250; seungjoo-ai/FLFL-NeurIPS24@decdf7d: src/data.py:190-213. PyTorch's
normalisation with `momentum=None` keeps the plain mean over the batches, whatever their sizes.
"""

import jax

from official.reference import classify, weighted_mean

BATCH = 8  # images; the tests set `fedjax_ssl.server.statistics.BATCH_SIZE` to it, so that there are several batches


def statistics_of(params, images):
    """The statistics of images [N, H, W, 1] as they lie, in batches; the last one may be short."""
    zeros = {"mean": 0.0, "var": 0.0}
    nothing = {"backbone": {name: zeros for name in params["backbone"] if name.endswith("_norm")}}
    seen = [classify(params, nothing, images[i : i + BATCH], train=True)[1] for i in range(0, len(images), BATCH)]
    # A running average takes a tenth of a batch's.
    return jax.tree.map(lambda leaf: 10 * leaf, weighted_mean(seen, [1] * len(seen)))
