"""``python -m statetap.coordinator``: serve the API until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from ..contracts.errors import StatetapError
from ..store.fs import make_dirs, replace_file
from ..store.probe import probe_store
from .app import create_app
from .context import Context
from .settings import CoordinatorSettings

log = logging.getLogger("statetap.coordinator")

GRACE_S = 1  # for requests in progress
LAST_S = 2.5  # after the signal the process ends, whatever still runs: all of it can be cut off


class Server(uvicorn.Server):
    """uvicorn's server that says which port it took, and that ends in time."""

    def __init__(self, app: FastAPI, config: uvicorn.Config, settings: CoordinatorSettings) -> None:
        super().__init__(config)
        self._app = app
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        if self._settings.port_file is not None:
            make_dirs(self._settings.port_file.absolute().parent)
            replace_file(self._settings.port_file.absolute(), f"{port}\n".encode())
        log.info("listening on %s:%d", self._settings.host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        context: Context = self._app.state.context
        context.events.stop()  # uvicorn would wait for the streams
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Threads that copy or plan cannot be interrupted and would hold up the interpreter's end.
        timer = threading.Timer(LAST_S, os._exit, args=(0,))
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> int:
    try:
        settings = CoordinatorSettings()
    except ValidationError as e:
        for error in e.errors(include_input=False, include_url=False):
            print(f"invalid_request: STATETAP_{'.'.join(map(str, error['loc'])).upper()}: {error['msg']}", file=sys.stderr, flush=True)
        return 2
    logging.basicConfig(stream=sys.stderr, level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # uvicorn's own start-up lines would say the same again.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        probe_store(settings.store)
        if settings.samples:
            from ..store.bucket import probe_bucket  # its library is slow to import, and who has no bucket needs it not

            probe_bucket(settings.samples)
        app = create_app(settings)
    except StatetapError as e:
        print(f"{e}\n  next: {e.next_step}", file=sys.stderr, flush=True)
        return 2
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        http="h11",  # whatever is installed: it bounds the head of a request (64 KiB), httptools does not
        timeout_graceful_shutdown=GRACE_S,
    )
    server = Server(app, config, settings)
    # uvicorn raises the signal once more when it has ended; without a handler the exit status would be that of a kill.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    try:
        server.run()
    except SystemExit as e:
        if e.code:
            return int(e.code)
    if not server.started:
        return 1
    log.info("stopped")
    logging.shutdown()
    os._exit(0)  # as above: no thread is waited for


if __name__ == "__main__":
    sys.exit(main())
