"""The statetap command: the stack on one host, and a client of its API."""
