"""The CLI's way to the coordinator: every answer is JSON, every problem becomes a StatetapError with the server's code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from ..contracts.errors import ErrorCode, RequestError


class Api:
    """``url`` is the coordinator's root. Reads are tried again for ``patience_s`` when it does not answer (it may be restarting)."""

    def __init__(self, url: str, *, patience_s: float = 2.0) -> None:
        self.url, self._patience_s = url.rstrip("/"), patience_s
        self._client = httpx.Client(base_url=self.url, timeout=httpx.Timeout(60.0, write=None))

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._checked(self._client.get(path, params={k: v for k, v in params.items() if v is not None}))
            except httpx.TransportError as e:
                if time.monotonic() > deadline:
                    raise self._away(e) from e
                time.sleep(0.5)

    def post(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Not tried again: the caller knows whether that would do the same thing twice."""
        try:
            return self._checked(self._client.post(path, **kwargs))
        except httpx.TransportError as e:
            raise self._away(e) from e

    def dataset_from_path(self, path: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Name a file that the coordinator sees under the same path."""
        return self.post("/v1/datasets", json={"path": str(path), **options})

    def upload_dataset(self, path: Path, options: dict[str, Any]) -> dict[str, Any]:
        """Stream a file to the coordinator."""
        with path.open("rb") as f:
            fields = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in options.items()}
            return self.post("/v1/datasets", data=fields, files={"file": (path.name, f, "application/octet-stream")})

    def _checked(self, response: httpx.Response) -> dict[str, Any]:
        try:
            data: Any = response.json()
        except ValueError:
            data = {}
        if response.is_success and isinstance(data, dict):
            return data
        known = data.get("code") if isinstance(data, dict) else None
        code = ErrorCode(known) if known in set(ErrorCode) else ErrorCode.INTERNAL
        detail = (data.get("detail") if isinstance(data, dict) else None) or response.text[:300] or response.reason_phrase
        raise RequestError(code, f"{detail}", status=response.status_code)

    def _away(self, e: httpx.TransportError) -> RequestError:
        return RequestError(ErrorCode.NOT_FOUND, f"no coordinator answers at {self.url} ({e}); start one with `statetap up`, or give --url")
