"""Federated semi-supervised learning in JAX: a cohort of clients trained as lanes of one compiled program."""

from fedjax_ssl.config import base_config
from fedjax_ssl.errors import TrainingError, UserError
from fedjax_ssl.experiment import train
from fedjax_ssl.method import State
from fedjax_ssl.predictor import Prediction, Predictor, load

__all__ = ["Prediction", "Predictor", "State", "TrainingError", "UserError", "base_config", "load", "train"]
