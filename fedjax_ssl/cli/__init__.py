"""The command line: parsing, help, fields read from the sources. Knows config; help imports no library."""
