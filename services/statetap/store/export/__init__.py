"""A job in the files of a trainer: ``statetap export``. One module a format; run.py does the work, docs/formats.md has the facts."""
