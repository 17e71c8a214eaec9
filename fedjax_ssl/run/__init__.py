"""A run from its configuration to its trained model. Knows all but the command line."""
