"""The client library: :class:`Client` and :class:`AsyncClient`, typed by the records of the API.

Paths, bodies, parsing, retries, resuming and reconnecting are written once (calls.py, flows.py); the two clients only send, sleep and
read. It imports httpx and the contracts, and nothing else.
"""

from __future__ import annotations

from .asynchronous import AsyncClient
from .errors import ApiError, UnreachableError, WaitTimeoutError
from .options import DatasetOptions, JobFilter, JobOptions
from .records import (
    Acked,
    Batches,
    Bytes,
    Collected,
    CollectedItem,
    Dataset,
    Deleted,
    Engine,
    Estimate,
    Health,
    Job,
    Rates,
    Row,
    RowError,
    Rows,
    Service,
    SmallerJob,
    Store,
    Tokens,
    Upload,
)
from .sync import Client

__all__ = [
    "Acked",
    "ApiError",
    "AsyncClient",
    "Batches",
    "Bytes",
    "Client",
    "Collected",
    "CollectedItem",
    "Dataset",
    "DatasetOptions",
    "Deleted",
    "Engine",
    "Estimate",
    "Health",
    "Job",
    "JobFilter",
    "JobOptions",
    "Rates",
    "Row",
    "RowError",
    "Rows",
    "Service",
    "SmallerJob",
    "Store",
    "Tokens",
    "UnreachableError",
    "Upload",
    "WaitTimeoutError",
]
