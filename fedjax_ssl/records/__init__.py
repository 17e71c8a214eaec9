"""The files of a run's folder, written and read. It imports the configuration and nothing of training."""
