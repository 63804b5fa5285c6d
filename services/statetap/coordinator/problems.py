"""Problems as RFC 9457 ``application/problem+json``: every answer that is not a success has one, with a code and a next step.

Invariant: what a user sees never holds a URL of Redis, a trace or another secret; those go to the log.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from ..contracts.errors import SPECS, ErrorCode, StatetapError
from ..store.fs import store_error

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """RFC 9457, with Statetap's code and next step."""

    type: str = Field(examples=["urn:statetap:error:not_found"], description="URN of the code.")
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["no job 'job-0000000000000000'"], description="What is wrong, naming the place.")
    code: ErrorCode = Field(examples=["not_found"])
    retryable: bool = Field(examples=[False], description="Whether the same request can succeed later.")
    next_step: str = Field(examples=["List what there is with GET on the collection."])
    field: str | None = Field(default=None, description="The field of the request that is wrong, where there is one.")
    errors: list[dict[str, Any]] | None = Field(default=None, description="All wrong fields: field and message.")
    numbers: dict[str, int] | None = Field(default=None, description="The figures behind a refusal, in bytes.")
    start_command: str | None = Field(default=None, description="The command that starts an engine which would serve the request.")


EXTENSIONS = ("field", "errors", "numbers", "start_command")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's declaration of the problems that an operation can answer; every operation can answer 500 and 503."""
    schema = {"schema": {"$ref": "#/components/schemas/Problem"}}
    return {
        status: {"model": Problem, "description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: schema}}
        for status in sorted({*statuses, 500, 503})
    }


def problem(code: ErrorCode, detail: str, *, status: int | None = None, **extensions: Any) -> JSONResponse:
    spec = SPECS[code]
    status = status or spec.status
    body: dict[str, Any] = {
        "type": f"urn:statetap:error:{code.value}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code.value,
        "retryable": spec.retryable,
        "next_step": extensions.get("next_step") or spec.next_step,  # what is to be done in this case, where more is known
    }
    body |= {k: v for k, v in extensions.items() if k in EXTENSIONS and v is not None}
    headers = {}
    if spec.retryable and status in (409, 429, 503):
        headers["Retry-After"] = str(math.ceil(extensions.get("retry_after_s", 2)))
    if status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="statetap"'
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Every way in which a request can fail -> a problem."""

    @app.exception_handler(StatetapError)
    async def ours(request: Request, e: StatetapError) -> JSONResponse:
        # A job's or row's code keeps its meaning as a status; the store's own failures are the service's.
        if SPECS[e.code].status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, e)
        return problem(e.code, e.message, **e.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, e: RequestValidationError) -> JSONResponse:
        # Not the input itself: it can be long, or a secret.
        errors = [{"field": _field(error["loc"]), "message": str(error["msg"])} for error in e.errors()]
        first = errors[0] if errors else {"field": "", "message": "the request is not valid"}
        detail = f"{first['field']}: {first['message']}" if first["field"] else first["message"]
        return problem(ErrorCode.INVALID_REQUEST, detail, field=first["field"] or None, errors=errors)

    @app.exception_handler(HTTPException)
    async def http(request: Request, e: HTTPException) -> JSONResponse:
        if e.status_code == 404:
            return problem(ErrorCode.NOT_FOUND, f"nothing at {request.url.path}")
        if e.status_code == 400:  # a body that is no text at all: as wrong as one that is no JSON
            return problem(ErrorCode.INVALID_REQUEST, str(e.detail))
        if e.status_code == 405:
            return _not_allowed(request)
        if e.status_code == 413:
            return problem(ErrorCode.TOO_LARGE, str(e.detail))
        response = problem(ErrorCode.INVALID_REQUEST, str(e.detail), status=e.status_code)
        response.headers.update(e.headers or {})
        return response

    @app.exception_handler(redis.RedisError)
    async def no_redis(request: Request, e: redis.RedisError) -> JSONResponse:
        log.warning("%s %s: Redis: %s", request.method, request.url.path, type(e).__name__)
        return problem(ErrorCode.REDIS_UNAVAILABLE, "Redis does not answer; what was accepted is safe on the store")

    @app.exception_handler(OSError)
    async def no_store(request: Request, e: OSError) -> JSONResponse:
        error = store_error(e, f"{request.method} {request.url.path}")
        log.warning("%s", error)
        return problem(error.code, error.message)

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> JSONResponse:  # the server logs the trace
        return problem(ErrorCode.INTERNAL, "an error of the coordinator; its log has the trace")


def _not_allowed(request: Request) -> JSONResponse:
    """405 with all methods of the path: Starlette names those of one route only, and each of ours has one."""
    methods = {
        method.upper()
        for path, operations in request.app.openapi()["paths"].items()
        if compile_path(path)[0].match(request.url.path)
        for method in operations
    }
    response = problem(ErrorCode.INVALID_REQUEST, f"{request.method} is not a method of {request.url.path}", status=405)
    response.headers["Allow"] = ", ".join(sorted(methods))
    return response


def _field(loc: tuple[Any, ...]) -> str:
    """("body", "rows", 0) -> "rows.0"."""
    return ".".join(str(part) for part in loc[1:]) if len(loc) > 1 else ""
