"""The files of a run's folder, written and read. Knows the configuration, and nothing of training."""
