"""``python -m statetap.worker``: the worker beside one engine. Waits for the engine, then does batches until SIGTERM or SIGINT.

Exit codes: 0 after a stop, 75 when the engine has another profile now (the supervisor starts the worker again), 1 with an error.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time

# Before numpy is imported: horses are forked from this process, and a thread pool does not survive a fork.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import redis
from pydantic import ValidationError

from ..contracts.errors import StatetapError
from ..store.probe import probe_store
from . import task  # noqa: F401  (what a horse needs is imported before it is forked, once and not a horse)
from .context import Context, make_context, set_current, wait_for_ready
from .settings import WorkerSettings
from .supervisor import BatchWorker, EngineKeeper, rq_connection

log = logging.getLogger("statetap.worker")

EXIT_OTHER_PROFILE = 75  # EX_TEMPFAIL


def main() -> int:
    try:
        settings = WorkerSettings()
    except ValidationError as e:
        print(f"statetap.worker: {e}", file=sys.stderr, flush=True)
        return 1
    logging.basicConfig(level=settings.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("rq").setLevel(logging.WARNING)
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        probe_store(settings.store)
        ready = wait_for_ready(settings, stop)
        if ready is None:
            return 0
        context = make_context(settings, ready, f"{ready.engine_id}-{secrets.token_hex(4)}")
    except StatetapError as e:
        log.error("event=cannot_start code=%s error=%s next=%s", e.code.value, e.message, e.next_step)
        return 1
    set_current(context)
    log.info(
        "event=worker_started id=%s engine=%s profile=%s tap_share=%d",
        context.worker_id,
        ready.engine_id,
        ready.profile.profile_id,
        context.tap_share,
    )
    return serve(context, stop)


def serve(context: Context, stop: threading.Event) -> int:
    keeper = EngineKeeper(context)
    connection = rq_connection(context.settings.redis_url.get_secret_value())
    keeper.start(lambda: os.kill(os.getpid(), signal.SIGTERM))
    wait = 1.0
    try:
        while not stop.is_set():
            began = time.monotonic()
            try:
                BatchWorker(context, connection, stop).work(logging_level=None)
            except redis.RedisError as e:  # RQ outlives an outage while it waits, but not while it registers itself
                log.warning("event=redis_away doing=work error=%s", type(e).__name__)
            if stop.is_set():
                break
            wait = 1.0 if time.monotonic() - began > 60 else min(wait * 2, 30.0)
            log.warning("event=worker_restarts after_s=%.0f", wait)
            stop.wait(wait)
    finally:
        keeper.close()
        connection.close()
    if keeper.changed.is_set():
        log.info("event=worker_ended reason=engine_changed")
        return EXIT_OTHER_PROFILE
    log.info("event=worker_ended reason=stop")
    return 0


if __name__ == "__main__":
    sys.exit(main())
