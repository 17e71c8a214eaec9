"""Arithmetic: losses, SGD, schedules, batches, pytrees. Has no code of federations, methods or files."""
