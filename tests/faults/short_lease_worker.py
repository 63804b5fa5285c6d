"""``python -m tests.faults.short_lease_worker``: the real worker with a lease of one second, so that a test can let a hundred of them lapse."""

from __future__ import annotations

import sys

from statetap.contracts import keys
from statetap.worker import lease
from statetap.worker.__main__ import main

if __name__ == "__main__":
    keys.LEASE_TTL_S, keys.LEASE_REFRESH_S, lease.TICK_S = 1.0, 0.3, 0.1
    sys.exit(main())
