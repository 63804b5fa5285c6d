"""/v1/datasets"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import anyio.to_thread
import redis
from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..contracts import keys
from ..contracts.errors import ErrorCode, RequestError
from ..contracts.records import DatasetSpec
from ..store.fs import remove
from . import datasets, engines, models
from .context import Context, Ctx
from .problems import responses
from .uploads import receive

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])

MAX_JSON = 64 << 10

Options = TypeVar("Options", bound=models.DatasetOptions)

_FORM_SCHEMA = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "format": "binary", "description": "The source file; streamed, of any size."}}
    | models.DatasetOptions.model_json_schema()["properties"],
}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": models.DatasetByPath.model_json_schema()},
            "multipart/form-data": {"schema": _FORM_SCHEMA},
        },
    }
}


@router.post(
    "",
    status_code=202,
    summary="Accept a dataset, by upload or by path",
    response_model=models.Dataset,
    openapi_extra=_BODY,
    responses={200: {"model": models.Dataset, "description": "It is there already"}, **responses(422, 507)},
)
async def create_dataset(request: Request, response: Response, ctx: Ctx) -> models.Dataset:
    """The source is on the store (or its path noted) when this answers; ingestion follows. Posting the same source with the same options
    again answers with the same dataset; one that failed is tried again."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        upload = await receive(request, ctx.settings.store)
        try:
            options = _validated(models.DatasetOptions, upload.fields)
            tokenizer = await _tokenizer(ctx, options)
        except BaseException:
            await anyio.to_thread.run_sync(remove, upload.path)
            raise
        spec, ingest = await anyio.to_thread.run_sync(datasets.accept_upload, ctx.catalog, upload, options, tokenizer)
    elif kind == "application/json":
        by_path = _validated(models.DatasetByPath, await _body(request))
        tokenizer = await _tokenizer(ctx, by_path)

        def accept() -> tuple[DatasetSpec, bool]:
            path = datasets.allowed_path(by_path.path, ctx.settings.data_dir, any_path=ctx.settings.allow_any_path)
            return datasets.accept_path(ctx.catalog, path, by_path, tokenizer)

        spec, ingest = await anyio.to_thread.run_sync(accept)
    else:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"content-type: {kind or 'none'} is neither multipart/form-data nor application/json", field=None
        )
    if ingest:
        ctx.reconciler.wake()
    answer = await _describe(ctx, spec)
    response.status_code = 202 if answer.state == "ingesting" else 200
    response.headers["Location"] = f"/v1/datasets/{spec.dataset_id}"
    return answer


@router.get("", summary="List datasets, newest first", responses=responses(422))
async def list_datasets(
    ctx: Ctx,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> models.DatasetList:
    specs = await anyio.to_thread.run_sync(lambda: list(ctx.catalog.datasets()))
    start = next((i + 1 for i, s in enumerate(specs) if s.dataset_id == cursor), None) if cursor is not None else 0
    if start is None:
        raise RequestError(ErrorCode.INVALID_REQUEST, "cursor: names no dataset", field="cursor")
    page = specs[start : start + limit]
    last = page[-1].dataset_id if start + limit < len(specs) else None
    return models.DatasetList(items=[await _describe(ctx, s) for s in page], next_cursor=last)


@router.get("/{dataset_id}", summary="How a dataset stands", responses=responses(404, 422))
async def get_dataset(dataset_id: str, ctx: Ctx) -> models.Dataset:
    return await _describe(ctx, await anyio.to_thread.run_sync(ctx.catalog.dataset, dataset_id))


async def _describe(ctx: Context, spec: DatasetSpec) -> models.Dataset:
    answer = await anyio.to_thread.run_sync(datasets.describe, ctx.catalog, spec, None)
    if answer.state != "ingesting":
        return answer
    try:
        progress = await ctx.redis.get(keys.dataset(spec.dataset_id))
    except redis.RedisError:
        return answer  # without its progress; that it is ingested is the store's to say
    return await anyio.to_thread.run_sync(datasets.describe, ctx.catalog, spec, progress)


async def _tokenizer(ctx: Context, options: models.DatasetOptions) -> str:
    if options.tokenizer is not None or options.format == "tokenized":
        return options.tokenizer or ""
    try:
        return engines.only_model(await ctx.engines())
    except redis.RedisError:
        return ""  # ingestion says it where one is needed


async def _body(request: Request) -> bytes:
    """A JSON body, bounded: it is a few fields."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON:
            raise RequestError(
                ErrorCode.INVALID_REQUEST, f"the JSON body is longer than {MAX_JSON} bytes; upload files as multipart/form-data"
            )
    return bytes(body)


def _validated(model: type[Options], data: bytes | dict[str, str]) -> Options:
    try:
        return model.model_validate_json(data) if isinstance(data, bytes) else model.model_validate(data)
    except ValidationError as e:
        errors: list[Any] = [error | {"loc": ("body", *error["loc"])} for error in e.errors(include_input=False, include_url=False)]
        raise RequestValidationError(errors) from e
