"""``python -m tests.faults.other_schema_worker``: the real worker of a release with another schema version."""

from __future__ import annotations

import sys

from statetap import contracts

contracts.SCHEMA_VERSION = 99

if __name__ == "__main__":
    from statetap.worker.__main__ import main

    sys.exit(main())
