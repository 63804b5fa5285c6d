"""Enqueues the ingestion of datasets that have no report and that nobody ingests.

Invariant: an accepted dataset is ingested until there is a report; that one which kills its process ends as failed is the task's to
count (datasets/task.py), which knows a kill from a stop.
"""

from __future__ import annotations

import logging

from ..contracts import keys
from ..contracts.layout import REPORT
from .catalog import Catalog
from .feed import Feed, ingest_rq_id

log = logging.getLogger(__name__)

CLAIM_TTL_S = 5  # also the time that a dequeued ingestion has to take its lock


def feed_ingestion(catalog: Catalog, feed: Feed) -> None:
    """One look. Raises RedisError, StoreError."""
    pending = [i for i in catalog.dataset_ids() if not (catalog.dataset_path(i) / REPORT).exists()]
    if not pending:
        return
    with feed.redis.pipeline(transaction=False) as pipe:
        for dataset_id in pending:
            pipe.exists(keys.ingesting(dataset_id))
        locked = pipe.execute()
    queued = feed.queued(keys.INGEST_QUEUE)
    for dataset_id, held in zip(pending, locked, strict=True):
        if held or ingest_rq_id(dataset_id) in queued:
            continue
        if feed.redis.set(keys.ingest_claim(dataset_id), "1", nx=True, ex=CLAIM_TTL_S):
            feed.enqueue_ingestion(dataset_id)
            log.info("%s: ingestion enqueued", dataset_id)
