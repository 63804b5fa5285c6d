"""The coordinator's application: the API, and the reconciler beside it.

Invariant: a request that cannot be served answers with a problem (problems.py); the process never imports torch or transformers.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from .. import __version__
from ..contracts.layout import DATASETS, JOBS
from ..store.fs import make_dirs
from . import (
    api_acks,
    api_datasets,
    api_delete,
    api_estimate,
    api_events,
    api_jobs,
    api_retry,
    api_session,
    api_system,
    api_uploads,
    openapi,
    page_files,
    problems,
)
from .auth import AuthMiddleware, Guard
from .catalog import Catalog
from .connections import connect_async
from .context import Context
from .events import Events
from .feed import Feed
from .idempotency import Idempotency
from .limits import BodyLimit
from .metrics import Metrics, RequestMetrics
from .reconciler import Reconciler
from .resumable import Resumable
from .settings import CoordinatorSettings
from .status import StatusReader
from .uploads import sweep

log = logging.getLogger(__name__)

STOP_S = 1.0  # the reconciler has to end its tick; cut off, the next start does the rest


def create_app(settings: CoordinatorSettings) -> FastAPI:
    """The application. Store and Redis are opened when it starts; Redis may be away then.

    Raises RequestError ``invalid_request`` for settings that would leave the API open to a network.
    """
    guard = Guard(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for name in (DATASETS, JOBS):
            make_dirs(settings.store / name)
        guard.start(settings.store)
        if swept := sweep(settings.store):
            log.info("removed %d uploads that were never finished", swept)
        idempotency = Idempotency(settings.store, settings.idempotency_ttl_s)
        idempotency.sweep()
        uploads = Resumable(settings.store, ttl_s=settings.upload_ttl_s, max_bytes=settings.max_upload_bytes)
        uploads.sweep()
        url = settings.redis_url.get_secret_value()
        client = connect_async(url)
        feed = Feed(url)
        catalog = Catalog(settings.store)
        reconciler = Reconciler(
            catalog,
            feed,
            tick_s=settings.tick_s,
            requeue_after_s=settings.requeue_after_s,
            rate_window_s=settings.rate_window_s,
            min_free_bytes=settings.min_free_bytes,
        )
        status = StatusReader(catalog, client, reconciler)
        app.state.context = Context(
            settings=settings,
            catalog=catalog,
            redis=client,
            reconciler=reconciler,
            status=status,
            idempotency=idempotency,
            uploads=uploads,
            events=Events(catalog, status),
        )
        reconciler.start()
        try:
            yield
        finally:
            reconciler.stop(STOP_S)
            feed.close()
            await client.aclose()

    app = FastAPI(
        title="Statetap",
        version=__version__,
        summary="Hidden states of every prompt token, out of a running SGLang, as checked training data.",
        description="Datasets are ingested, jobs prefill their rows on an engine and keep the states. Problems are RFC 9457.",
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,  # functions are named for what they do; tests/integration/test_api_schema.py
        docs_url=None,  # /docs is our own page (docs_page.py): FastAPI's loads its scripts from elsewhere
        redoc_url=None,
    )
    problems.install(app)
    # The last one added sees a request first.
    app.add_middleware(BodyLimit, limit=settings.max_json_bytes)
    app.add_middleware(AuthMiddleware, guard=guard)
    app.state.metrics = Metrics()
    app.add_middleware(RequestMetrics, metrics=app.state.metrics)
    app.state.guard = guard
    for module in (
        api_acks, api_datasets, api_delete, api_estimate, api_events, api_jobs, api_retry, api_session, api_system, api_uploads,
    ):  # fmt: skip
        app.include_router(module.router)
    app.router.routes.extend(page_files.routes())
    openapi.install(app)
    return app
