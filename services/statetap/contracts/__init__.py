"""What the services say to each other: frozen records, error codes, boundaries, key names, file headers.

Stdlib only and no I/O, so that every service (the engine inside SGLang's own environment included) can import it.
"""

SCHEMA_VERSION = 1
"""Version of job.json, plans, ledger lines and batch references. A worker of another version never sees the work."""

PROTOCOL = 1
"""Version of what the engine puts into ``meta_info.capture`` and of the tap file. Checked on every reply."""
