"""The command line: commands, help, fields read from the sources. No other folder imports it; help loads no JAX."""
