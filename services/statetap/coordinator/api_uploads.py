"""/v1/uploads: files that are sent in pieces and go on where a cut left them (the core of tus, draft-ietf-httpbis-resumable-upload)."""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Header, Path, Request, Response

from ..contracts.errors import ErrorCode, RequestError
from . import models
from .context import Ctx
from .problems import responses

router = APIRouter(prefix="/v1/uploads", tags=["datasets"])

OFFSET = "Upload-Offset"
PIECE = "application/offset+octet-stream"

UploadId = Annotated[str, Path(max_length=64, description="The upload's id.", examples=["up-0b9f3c52d5a84f0f9b1f6a7c8d9e0f11"])]

_OFFSET_HEADER = {OFFSET: {"description": "Bytes that are safe on the store.", "schema": {"type": "integer", "minimum": 0}}}


@router.post(
    "",
    status_code=201,
    summary="Begin an upload in pieces",
    responses={201: {"headers": {"Location": {"schema": {"type": "string"}}}}, **responses(413, 422, 507)},
)
async def create_upload(body: models.UploadRequest, response: Response, ctx: Ctx) -> models.Upload:
    """Send the bytes by PATCH, then make a dataset of it with `upload_id`."""
    state = await anyio.to_thread.run_sync(ctx.uploads.create, body.filename, body.size)
    response.headers["Location"] = f"/v1/uploads/{state.upload_id}"
    response.headers[OFFSET] = str(state.offset)
    return models.Upload(**vars(state))


@router.get("/{upload_id}", summary="How far an upload is", responses={200: {"headers": _OFFSET_HEADER}, **responses(404, 422)})
async def get_upload(upload_id: UploadId, response: Response, ctx: Ctx) -> models.Upload:
    """After a cut: the next piece begins at `offset`."""
    state = await anyio.to_thread.run_sync(ctx.uploads.state, upload_id)
    response.headers[OFFSET] = str(state.offset)
    response.headers["Cache-Control"] = "no-store"
    return models.Upload(**vars(state))


@router.head(
    "/{upload_id}",
    summary="How far an upload is, as a header",
    response_class=Response,
    responses={200: {"headers": _OFFSET_HEADER, "content": {}}, **responses(404, 422)},
)
async def head_upload(upload_id: UploadId, ctx: Ctx) -> Response:
    """As GET, without a body."""
    state = await anyio.to_thread.run_sync(ctx.uploads.state, upload_id)
    return Response(headers={OFFSET: str(state.offset), "Cache-Control": "no-store"})


@router.patch(
    "/{upload_id}",
    status_code=204,
    summary="Send a piece of an upload",
    openapi_extra={"requestBody": {"required": True, "content": {PIECE: {"schema": {"type": "string", "format": "binary"}}}}},
    responses={204: {"description": "It is on the store", "headers": _OFFSET_HEADER}, **responses(404, 409, 413, 422, 507)},
)
async def append_upload(
    upload_id: UploadId,
    request: Request,
    ctx: Ctx,
    upload_offset: Annotated[int, Header(alias=OFFSET, ge=0, description="Where the piece begins: the present offset.")],
) -> Response:
    """The body is the bytes from `Upload-Offset` on, of any length. Where another offset is the present one it is refused (409) and
    `numbers.offset` says which; a piece that is cut off keeps what arrived. One piece at a time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != PIECE:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"content-type: {kind or 'none'} is not {PIECE}", field="content-type")
    declared = request.headers.get("content-length", "")
    length = int(declared) if declared.isascii() and declared.isdigit() else None
    offset = await ctx.uploads.append(upload_id, upload_offset, length, request.stream())
    return Response(status_code=204, headers={OFFSET: str(offset)})


@router.delete("/{upload_id}", status_code=204, summary="Give an upload up", responses=responses(404, 409, 422))
async def delete_upload(upload_id: UploadId, ctx: Ctx) -> Response:
    """Its bytes are removed at once."""
    await anyio.to_thread.run_sync(ctx.uploads.delete, upload_id)
    return Response(status_code=204)
