"""Trains a run from its configuration. May import everything but the command line.

`observe/` writes records and shows progress; `hosts/` spreads one run over several hosts.
"""
