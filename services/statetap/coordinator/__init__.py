"""FastAPI: datasets, jobs, engines, status; and the reconciler, the only one that enqueues batches."""
