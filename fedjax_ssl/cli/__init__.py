"""The command line: commands, help, fields read from the sources. Nothing else imports it; help does not load JAX."""
