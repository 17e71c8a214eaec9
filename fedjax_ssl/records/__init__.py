"""Writes and reads the files of a run's folder. It imports the configuration, but no training code."""
