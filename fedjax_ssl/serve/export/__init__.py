"""Exports a trained model: safetensors, StableHLO, ONNX, or a folder for the Hugging Face Hub.

It uses the records of runs and the predictor, but no training code.
"""

from fedjax_ssl.serve.export.formats import FORMATS, export_run
