"""The page: one HTML document, its style and its scripts, as they lie in ``page/``. All that it shows comes from the API.

Invariant: the page loads nothing from elsewhere and runs no script but these (Content-Security-Policy), so that it works on a host
without a way out, and text of a dataset or an error can never become a script beside the API.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import xxhash
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304: an upgrade shows at once
    "Vary": "Accept",
}
INDEX = "index.html"


@dataclass(frozen=True)
class _File:
    data: bytes
    headers: dict[str, str]

    def answer(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.data, headers=self.headers)


def _load() -> dict[str, _File]:
    found = {}
    for file in files(__package__).joinpath("page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            data = file.read_bytes()
            tag = f'"{xxhash.xxh3_64_hexdigest(data)}"'
            found[file.name] = _File(data, _HEADERS | {"Content-Type": f"{_TYPES[suffix]}; charset=utf-8", "ETag": tag})
    return found


_FILES = _load()
PATHS = tuple(f"/page/{name}" for name in sorted(_FILES) if name != INDEX)


def wanted(request: Request) -> bool:
    """Whether who asks for ``/`` is a browser that goes there."""
    return "text/html" in request.headers.get("accept", "")


def index(request: Request) -> Response:
    return _FILES[INDEX].answer(request)


def _file(request: Request) -> Response:
    return _FILES[request.url.path.rpartition("/")[2]].answer(request)


def routes() -> list[Route]:
    """Of all files but the document, which is at ``/``."""
    return [Route(path, _file, methods=["GET"], include_in_schema=False) for path in PATHS]
