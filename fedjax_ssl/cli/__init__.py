"""The command line: commands, help, fields read from the sources. On top of all; help imports no library."""
