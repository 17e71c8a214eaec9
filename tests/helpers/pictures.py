"""Images for comparisons with Pillow."""

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NUM_IMAGES = 6


def make_images(channels, side):
    """Smooth colour gradients, enlarged digits, low contrast, noise: uint8 [6, side, side, channels]."""
    rng = np.random.default_rng(side)
    images = []
    for index in range(NUM_IMAGES):
        planes = []
        for _ in range(channels):
            coarse = rng.integers(0, 256, (5, 5)).astype(np.uint8)
            smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.BICUBIC), np.float32)
            digit = load_digits().images[index].astype(np.uint8) * 15
            digit = np.asarray(Image.fromarray(digit).resize((side, side), Image.BILINEAR), np.float32)
            noise = rng.normal(0, 12, (side, side))
            kinds = [smooth, digit, 0.3 * smooth + 90, smooth + noise, digit + smooth / 3, 8 * noise]
            planes.append(kinds[index])
        images.append(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))
    return np.stack(images)


def agreement(ours, pillows):
    """The share of each image's pixels within one grey level: [B]."""
    close = np.abs(ours.astype(int) - pillows.astype(int)) <= 1
    return close.reshape(len(close), -1).mean(axis=1)
