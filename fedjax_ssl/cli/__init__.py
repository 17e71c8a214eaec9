"""Words of a command line: parsing, help, what the sources say of fields. Knows config; help waits for no library."""
