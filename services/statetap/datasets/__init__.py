"""Anything a user has -> normalised token rows on disk, streaming, in a process of its own."""
