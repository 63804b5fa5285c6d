"""The RQ task that ingests one dataset: a lock, progress in Redis, and the promise that every ingestion ends with a report.

Invariant: at most one process is at a dataset while Redis keeps the lock, and without it no harm is done (:mod:`.ingest` writes
under temp names). A dataset that ended its process MAX_STARTS times is reported as failed, so that no loop goes on for ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from ..contracts import keys
from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.layout import DATASET_SPEC, REPORT, dataset_dir
from ..contracts.records import DatasetSpec, DatasetState, DatasetStatus
from ..store.fs import read_json
from .ingest import Limits, StoppedError, ingest, report_once
from .settings import Settings

logger = logging.getLogger(__name__)

MAX_STARTS = 3
PROGRESS_TTL_S = 60

# Refresh and release touch the lock only while it is ours.
_REFRESH = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('pexpire', KEYS[1], ARGV[2]) or 0"
_RELEASE = "return redis.call('get', KEYS[1]) == ARGV[1] and redis.call('del', KEYS[1]) or 0"


def run_ingest(dataset_id: str) -> None:
    """Ingest the dataset that ``dataset.json`` describes; the task of keys.INGEST_QUEUE. Safe to run any number of times.

    Returns at once where there is a report, or where another process holds the lock. SIGTERM ends it within a record batch: nothing is
    reported then, and whoever enqueues it again starts it from nothing.

    Raises:
        RequestError: ``not_found`` where there is no dataset.json.
        StoreError: the report cannot be written.
    """
    settings = Settings()
    folder = settings.store / dataset_dir(dataset_id)
    if (folder / REPORT).exists():
        logger.info("dataset %s has its report already", dataset_id)
        return
    described = read_json(folder / DATASET_SPEC)
    if described is None:
        raise RequestError(ErrorCode.NOT_FOUND, f"no {DATASET_SPEC} of dataset {dataset_id}")
    spec = DatasetSpec.from_dict(described)
    stopping = threading.Event()
    with (
        redis.Redis.from_url(settings.redis_url.get_secret_value()) as connection,
        _lock(connection, dataset_id) as held,
        _sigterm(stopping),
    ):
        if not held:
            logger.info("dataset %s is being ingested by another process", dataset_id)
            return
        starts = int(connection.hincrby(keys.INGEST_STARTS, dataset_id, 1))
        if starts > MAX_STARTS:
            status = _give_up(folder, dataset_id)
        else:
            logger.info("dataset %s: ingesting %s", dataset_id, ", ".join(spec.files))
            try:
                limits = Limits(row_bytes=settings.max_row_bytes, row_tokens=settings.max_row_tokens)
                status = ingest(spec, settings.store, lambda s: _publish(connection, s), stopping.is_set, limits)
            except StoppedError as e:
                _counted(connection, dataset_id, -1)
                logger.info("dataset %s: %s; it has to be begun again", dataset_id, e)
                return
            except StoreError:  # the report cannot be written: the store's fault, not one of this dataset
                _counted(connection, dataset_id, -1)
                raise
        _publish(connection, status)
        _counted(connection, dataset_id, -starts)
    if status.error:
        logger.error("dataset %s failed: %s: %s", dataset_id, status.error["code"], status.error["message"])
    else:
        logger.info("dataset %s is ready: %d of %d rows, %d tokens", dataset_id, status.accepted, status.rows, status.tokens)


def _give_up(folder: Path, dataset_id: str) -> DatasetStatus:
    message = f"ingestion ended its process {MAX_STARTS} times without an answer (out of memory, or a tokenizer that crashes)"
    error = {"code": ErrorCode.DATASET_FAILED.value, "message": message}
    return report_once(folder, DatasetStatus(dataset_id=dataset_id, state=DatasetState.FAILED.value, error=error, updated_at=time.time()))


def _counted(connection: redis.Redis, dataset_id: str, by: int) -> None:
    """This start did not end its process after all. Without Redis the count stays one too high, which at worst gives up early."""
    with contextlib.suppress(redis.RedisError):
        if int(connection.hincrby(keys.INGEST_STARTS, dataset_id, by)) <= 0:
            connection.hdel(keys.INGEST_STARTS, dataset_id)


def _publish(connection: redis.Redis, status: DatasetStatus) -> None:
    """Progress is a courtesy: Redis being away does not end an ingestion; the report is on the store."""
    try:
        connection.set(keys.dataset(status.dataset_id), json.dumps(status.to_dict()), ex=PROGRESS_TTL_S)
    except redis.RedisError as e:
        logger.warning("dataset %s: progress not published: %s", status.dataset_id, type(e).__name__)


@contextlib.contextmanager
def _lock(connection: redis.Redis, dataset_id: str) -> Iterator[bool]:
    """Hold keys.ingesting(dataset_id), refreshed by a thread; yields whether it is ours."""
    key, holder, ended = keys.ingesting(dataset_id), secrets.token_hex(8), threading.Event()
    ttl_ms = int(keys.INGEST_LOCK_TTL_S * 1000)
    if not connection.set(key, holder, nx=True, px=ttl_ms):
        yield False
        return

    def refresh() -> None:
        while not ended.wait(keys.INGEST_LOCK_TTL_S / 6):
            try:
                connection.eval(_REFRESH, 1, key, holder, ttl_ms)
            except redis.RedisError as e:
                logger.warning("dataset %s: lock not refreshed: %s", dataset_id, type(e).__name__)

    thread = threading.Thread(target=refresh, name="ingest-lock", daemon=True)
    thread.start()
    try:
        yield True
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(redis.RedisError):  # it lapses by itself
            connection.eval(_RELEASE, 1, key, holder)


@contextlib.contextmanager
def _sigterm(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM sets ``stopping``; RQ gives its horses the default action, which would leave temp files."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
