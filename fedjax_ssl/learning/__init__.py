"""Arithmetic: losses, SGD, schedules, batches, pytrees. Knows no federation, no method and no disk."""
