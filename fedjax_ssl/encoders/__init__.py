"""Pretrained encoders: architectures whose weights come from a file, frozen, for features or with adapters.

An encoder is a backbone of `fedjax_ssl.models` with the images that its weights were trained on. `convert` makes a
weights file out of PyTorch's, `load_weights` reads it, `frozen` maps images to features, and `Adapted` is a backbone of
which low-rank adapters alone are trained.
"""

from fedjax_ssl.encoders.adapters import Adapted, backbone_of
from fedjax_ssl.encoders.convert import convert
from fedjax_ssl.encoders.encoder import ENCODERS, Encoder, encode, find_encoder
from fedjax_ssl.encoders.frozen import frozen
from fedjax_ssl.encoders.weights import checksum, load_weights, save_weights

__all__ = [
    "ENCODERS",
    "Adapted",
    "Encoder",
    "backbone_of",
    "checksum",
    "convert",
    "encode",
    "find_encoder",
    "frozen",
    "load_weights",
    "save_weights",
]
