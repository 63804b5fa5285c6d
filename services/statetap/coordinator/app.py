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
from . import api_datasets, api_jobs, api_system, problems
from .catalog import Catalog
from .connections import connect_async
from .context import Context
from .feed import Feed
from .reconciler import Reconciler
from .settings import CoordinatorSettings
from .status import StatusReader
from .uploads import sweep

log = logging.getLogger(__name__)

STOP_S = 1.0  # the reconciler has to end its tick; cut off, the next start does the rest


def create_app(settings: CoordinatorSettings) -> FastAPI:
    """The application. Store and Redis are opened when it starts; Redis may be away then."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for name in (DATASETS, JOBS):
            make_dirs(settings.store / name)
        if swept := sweep(settings.store):
            log.info("removed %d uploads that were never finished", swept)
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
        app.state.context = Context(
            settings=settings,
            catalog=catalog,
            redis=client,
            reconciler=reconciler,
            status=StatusReader(catalog, client, reconciler),
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
    )
    problems.install(app)
    for module in (api_datasets, api_jobs, api_system):
        app.include_router(module.router)
    return app
