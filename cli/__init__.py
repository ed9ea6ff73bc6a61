"""The command line: each command parses its arguments, makes one call of the library and renders the result."""
