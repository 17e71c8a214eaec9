"""Pretrained encoders, whose frozen weights come from a file; they compute features or get adapters.

An encoder is a backbone of `fedjax_ssl.models` with the size and normalisation of images of its weights. `convert`
makes a weights file from PyTorch's, `load_weights` reads it, `frozen` maps images to features, and `WithAdapters` is a
backbone of which only low-rank adapters are trained.
"""

from fedjax_ssl.models.encoders.adapters import ENCODED_TOGETHER, WithAdapters, backbone_of, frozen
from fedjax_ssl.models.encoders.convert import convert
from fedjax_ssl.models.encoders.encoder import ENCODERS, encode, find_encoder
from fedjax_ssl.models.encoders.weights import checksum, load_weights, save_weights
