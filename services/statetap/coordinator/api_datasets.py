"""/v1/datasets"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
import anyio.to_thread
import redis
from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..contracts import keys
from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import DATASET_SPEC
from ..contracts.records import DatasetSpec, DatasetState
from ..store.fs import remove
from . import datasets, engines, models
from .auth import Asking, Caller
from .context import Context, Ctx
from .idempotency import REPLAYED, Key, claimed, fingerprint
from .paging import page
from .problems import responses
from .tokenizers import allowed_tokenizer, check_remote_code
from .uploads import Upload, receive

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])

Options = TypeVar("Options", bound=models.DatasetOptions)

_FORM_SCHEMA = {
    "type": "object",
    "required": ["file"],
    "properties": {"file": {"type": "string", "format": "binary", "description": "The source file; streamed, of any size."}}
    | models.DatasetOptions.model_json_schema()["properties"],
}
_REQUEST = models.DatasetRequest.model_json_schema(ref_template="#/components/schemas/{model}")
_REQUEST.pop("$defs", None)  # openapi.py puts them among the components
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _REQUEST},
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
    responses={200: {"model": models.Dataset, "description": "It is there already"}, **responses(403, 404, 409, 413, 422, 507)},
)
async def create_dataset(request: Request, response: Response, ctx: Ctx, caller: Asking, idempotency_key: Key = None) -> models.Dataset:
    """The source is on the store (or its path noted) when this answers; ingestion follows. Posting the same source with the same options
    again answers with the same dataset; one that failed is tried again."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        upload = await receive(request, ctx.settings.store, ctx.settings.max_upload_bytes)
        try:
            options = _validated(models.DatasetOptions, upload.fields)
            accept = partial(datasets.accept, ctx.catalog, [upload], options, merged=False)
            wanted = fingerprint(options.model_dump(exclude_defaults=True) | {"sha256": upload.sha256, "size": upload.size})
            return await _create(ctx, response, caller, options, accept, idempotency_key, wanted)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove, upload.path)
    if kind == "application/json":
        asked = _validated(models.DatasetRequest, await request.body())
        wanted = fingerprint(asked.model_dump(exclude_defaults=True))
        return await _create(ctx, response, caller, asked, partial(_accept, ctx, asked), idempotency_key, wanted)
    raise RequestError(ErrorCode.INVALID_REQUEST, f"content-type: {kind or 'none'} is neither multipart/form-data nor application/json")


async def _create(
    ctx: Context,
    response: Response,
    caller: Caller,
    options: models.DatasetOptions,
    accept: Callable[[str, datasets.Begin], tuple[DatasetSpec, bool]],
    key: str | None,
    wanted: str,
) -> models.Dataset:
    """``accept`` makes the dataset, given the tokenizer and what records its id beforehand."""

    def made(dataset_id: str) -> bool:
        return (ctx.catalog.dataset_path(dataset_id) / DATASET_SPEC).exists()

    async with claimed(ctx.idempotency, key, f"POST /v1/datasets {caller.name}", wanted, made) as claim:
        if claim.made:
            spec = await anyio.to_thread.run_sync(ctx.catalog.dataset, claim.resource_id)
            response.headers[REPLAYED] = "true"
        else:
            tokenizer = await _tokenizer(ctx, options, caller)
            spec, ingest = await anyio.to_thread.run_sync(accept, tokenizer, claim.name)
            if ingest:
                ctx.reconciler.wake()
        answer = await _describe(ctx, spec)
        response.status_code = claim.status or (202 if answer.state == "ingesting" else 200)
        await anyio.to_thread.run_sync(claim.finish, response.status_code)
    response.headers["Location"] = f"/v1/datasets/{spec.dataset_id}"
    return answer


def _accept(ctx: Context, asked: models.DatasetRequest, tokenizer: str, begin: datasets.Begin) -> tuple[DatasetSpec, bool]:
    named = asked.sources if asked.sources is not None else [models.Source(path=asked.path, upload_id=asked.upload_id)]
    sources: list[Path | Upload] = []
    with ExitStack() as taken:
        for i, source in enumerate(named):
            if source.upload_id is not None:
                sources.append(taken.enter_context(ctx.uploads.take(source.upload_id)))
            else:
                field = "path" if asked.sources is None else f"sources.{i}.path"
                any_path = ctx.settings.allow_any_path
                sources.append(datasets.allowed_path(source.path or "", ctx.settings.data_dir, any_path=any_path, field=field))
        return datasets.accept(ctx.catalog, sources, asked, tokenizer, begin, merged=asked.sources is not None)


@router.get("", summary="List datasets, newest first", responses=responses(422))
async def list_datasets(
    ctx: Ctx,
    state: Annotated[
        list[DatasetState] | None, Query(description="Only datasets in one of these states; may be given several times.")
    ] = None,
    name: Annotated[str | None, Query(max_length=200, description="Only datasets whose name contains this, in capitals or not.")] = None,
    cursor: Annotated[str | None, Query(max_length=200, description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> models.DatasetList:
    """A cursor stays valid while datasets are made and deleted, and with other filters."""

    def wanted(spec: DatasetSpec) -> bool:
        if name is not None and name.casefold() not in spec.name.casefold():
            return False
        if state is None:
            return True
        report = ctx.catalog.report(spec.dataset_id)
        return (report.state if report else DatasetState.INGESTING) in state

    specs, last = await anyio.to_thread.run_sync(lambda: page(ctx.catalog.datasets(), lambda s: s.dataset_id, wanted, cursor, limit))
    return models.DatasetList(items=await _describe_all(ctx, specs), next_cursor=last)


@router.get("/{dataset_id}", summary="How a dataset stands", responses=responses(404, 422))
async def get_dataset(dataset_id: str, ctx: Ctx) -> models.Dataset:
    """While it is ingested: how far that is. Afterwards its counts, and the first bad rows by line."""
    return await _describe(ctx, await anyio.to_thread.run_sync(ctx.catalog.dataset, dataset_id))


async def _describe(ctx: Context, spec: DatasetSpec) -> models.Dataset:
    return (await _describe_all(ctx, [spec]))[0]


async def _describe_all(ctx: Context, specs: list[DatasetSpec]) -> list[models.Dataset]:
    """One look at the store for all of them, and one at Redis for the progress of those that are being ingested."""
    answers = await anyio.to_thread.run_sync(lambda: [datasets.describe(ctx.catalog, s, None) for s in specs])
    busy = [i for i, a in enumerate(answers) if a.state == DatasetState.INGESTING]
    if busy:
        try:
            told = await ctx.redis.mget([keys.dataset(specs[i].dataset_id) for i in busy])
        except redis.RedisError:
            return answers  # without their progress; that they are ingested is the store's to say
        for i, progress in zip(busy, told, strict=True):
            answers[i] = await anyio.to_thread.run_sync(datasets.describe, ctx.catalog, specs[i], progress)
    return answers


async def _tokenizer(ctx: Context, options: models.DatasetOptions, caller: Caller) -> str:
    """The tokenizer that was named and is allowed, or the only live model's. Raises RequestError (tokenizers.py)."""
    check_remote_code(options.trust_remote_code, caller, ctx.settings)
    if options.tokenizer is None and options.format == "tokenized":
        return ""
    try:
        live = await ctx.engines()
    except redis.RedisError:
        live = []  # ingestion says it where a tokenizer is needed
    if options.tokenizer is None:
        return engines.only_model(live)
    models_of = {str(e.profile.get("model", "")) for e in live}
    return await anyio.to_thread.run_sync(allowed_tokenizer, options.tokenizer, caller, ctx.settings, models_of)


def _validated(model: type[Options], data: bytes | dict[str, str]) -> Options:
    try:
        return model.model_validate_json(data) if isinstance(data, bytes) else model.model_validate(data)
    except ValidationError as e:
        errors: list[Any] = [error | {"loc": ("body", *error["loc"])} for error in e.errors(include_input=False, include_url=False)]
        raise RequestValidationError(errors) from e
