"""The local trainers in NumPy, image by image: the weight of each pseudo-label in a batch.

`weigh(p, positions)` takes the probabilities of a batch's images, [n, C], and their positions among the client's
images, and returns their weights.
"""

import numpy as np

from tests.helpers.linear_network import softmax


class FixMatch:
    def __init__(self, tau):
        self.tau = tau

    def weigh(self, p, positions):
        return np.array([float(max(row) >= self.tau) for row in p])


class FlexMatch:
    """A dict of stored labels; `warm_up` also counts the images without one."""

    def __init__(self, tau, size, num_classes, warm_up=True):
        self.tau, self.size, self.num_classes, self.warm_up, self.stored = tau, size, num_classes, warm_up, {}

    def weigh(self, p, positions):
        counts = [sum(label == c for label in self.stored.values()) for c in range(self.num_classes)]
        largest = max([*counts, self.size - len(self.stored)] if self.warm_up else counts)
        weights = []
        for row in p:
            beta = counts[np.argmax(row)] / largest if largest else 0.0
            weights.append(float(max(row) >= self.tau * beta / (2 - beta)))
        for row, position in zip(p, positions):
            if max(row) >= self.tau:
                self.stored[int(position)] = int(np.argmax(row))
        return np.array(weights)


class FreeMatch:
    """With bounds of the thresholds."""

    def __init__(self, num_classes, momentum, clamp=(0.0, 1.0)):
        self.m, self.level, self.clamp = momentum, 1 / num_classes, clamp
        self.by_class, self.histogram = np.full(num_classes, 1 / num_classes), np.full(num_classes, 1 / num_classes)

    def weigh(self, p, positions):
        if not len(p):
            return np.zeros(0)
        m, labels = self.m, p.argmax(axis=1)
        self.level = m * self.level + (1 - m) * p.max(axis=1).mean()
        self.by_class = m * self.by_class + (1 - m) * p.mean(axis=0)
        shares = np.bincount(labels, minlength=p.shape[1]) / len(p)
        self.histogram = m * self.histogram + (1 - m) * shares
        needed = np.clip(self.level * self.by_class[labels] / self.by_class.max(), *self.clamp)
        return (p.max(axis=1) >= needed).astype(float)


class SoftMatch:
    def __init__(self, num_classes, momentum):
        self.m = momentum
        self.mean, self.variance, self.by_class = 1 / num_classes, 1.0, None

    def weigh(self, p, positions):
        if not len(p):
            return np.zeros(0)
        m, now = self.m, p.mean(axis=0)
        self.by_class = now if self.by_class is None else m * self.by_class + (1 - m) * now
        p = p / self.by_class
        best = (p / p.sum(axis=1, keepdims=True)).max(axis=1)
        self.mean = m * self.mean + (1 - m) * best.mean()
        if len(p) > 1:
            self.variance = m * self.variance + (1 - m) * best.var(ddof=1)
        below = np.minimum(best - self.mean, 0)
        return np.exp(-(below**2) / (2 * self.variance / 2**2))


def fairness_by_hand(by_class, histogram, logits):
    """sum a log b over the accepted images' logits."""
    p = softmax(logits)
    shares = np.bincount(p.argmax(axis=1), minlength=p.shape[1]) / len(p)
    a = np.array([q / h if h else 0.0 for q, h in zip(by_class, histogram)])
    b = np.array([q / h if h else 0.0 for q, h in zip(p.mean(axis=0), shares)])
    return np.sum(a / a.sum() * np.log(b / b.sum() + 1e-12))
