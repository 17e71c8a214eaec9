"""Arithmetic: losses, SGD, schedules, batches, pytrees. Contains no code for federations, methods or files."""
