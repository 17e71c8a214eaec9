"""A run from its configuration to its trained model. Knows all but the command line.

`observe/` has what a run writes down and shows, `hosts/` one run on several hosts.
"""
