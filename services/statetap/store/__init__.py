"""What is kept: sample files, grouped commit, ledger, manifest, verify and readers. Knows nothing of Redis or HTTP."""
