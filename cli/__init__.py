"""The command line: a command parses, makes one call of the library, and renders; it knows nothing of queues."""
