"""``python -m statetap.datasets``: the ingestion process, an RQ worker on its own queue that forks a horse a dataset.

A horse a dataset, so that whatever a tokenizer leaks or breaks ends with it. The parent has imported the tokenizers, so
a horse starts at once; torch is hidden from them, because they need none of it and it would be 250 MiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from types import FrameType

from .settings import Settings

logger = logging.getLogger("statetap.datasets")


def _preload() -> None:
    # transformers looks for torch by find_spec, which takes None in sys.modules for "not installed".
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from . import mask, task  # noqa: F401


def main() -> int:
    """Serve until SIGTERM or SIGINT; 0 then, 1 where Redis ends the connection for good (the supervisor starts it again)."""
    settings = Settings()
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    _preload()

    import redis
    from rq import Queue, Worker
    from rq.serializers import JSONSerializer

    from ..contracts.keys import INGEST_QUEUE

    logging.getLogger("rq.worker").setLevel(logging.WARNING)  # after the import, which sets INFO: the task logs what happens

    class IngestWorker(Worker):
        """A worker whose first SIGTERM reaches the horse too: the ingestion stops within a record batch and is begun again."""

        def request_stop(self, signum: int, frame: FrameType | None) -> None:
            logger.info("stopping on %s", signal.Signals(signum).name)
            if self.horse_pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.horse_pid, signal.SIGTERM)
            super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    connection = redis.Redis.from_url(settings.redis_url.get_secret_value())
    try:
        connection.ping()
        queue = Queue(INGEST_QUEUE, connection=connection, serializer=JSONSerializer)
        worker = IngestWorker([queue], connection=connection, serializer=JSONSerializer)
        logger.info("serving %s, store %s", INGEST_QUEUE, settings.store)
        worker.work(logging_level=None)  # the level set above holds
    except redis.RedisError as e:
        logger.error("redis_unavailable: %s; check STATETAP_REDIS_URL", type(e).__name__)
        return 1
    logger.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
