"""Statetap: taps hidden states out of a running SGLang server and keeps them as checked training data."""

__version__ = "0.1.0"
