"""Maps embeddings to a plane by t-SNE, as in FedAnchor's Figure 5."""

import numpy as np


def to_plane(embeddings: np.ndarray) -> np.ndarray:
    """Positions of embeddings [n, D] in a plane: float [n, 2], by scikit-learn's t-SNE; deterministic.

    Distances are Euclidean between unit vectors: their order is that of the cosines that give pseudo-labels.
    """
    from sklearn.manifold import TSNE  # takes a second to import
    from threadpoolctl import threadpool_limits

    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(lengths > 0, lengths, 1)
    # Too few points for neighbourhoods, or fewer than two directions, as from a network with only dead units.
    if len(unit) < 4 or unit.shape[1] < 2 or np.max(np.ptp(unit, axis=0)) < 1e-6:
        return np.pad(unit[:, :2], ((0, 0), (0, max(0, 2 - unit.shape[1]))))
    perplexity = min(30.0, (len(unit) - 1) / 3)
    # One thread: with so few points, several threads wait for each other, up to a minute if other runs use the cores.
    with threadpool_limits(1):
        return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(unit)
