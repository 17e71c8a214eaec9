"""A trained model in formats that others read: safetensors, StableHLO, ONNX, a folder for the Hugging Face Hub.

Knows runs' records and the predictor; nothing of training.
"""

from fedjax_ssl.export.formats import FORMATS, export_run

__all__ = ["FORMATS", "export_run"]
