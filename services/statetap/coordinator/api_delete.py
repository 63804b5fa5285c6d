"""DELETE on jobs and datasets, and /v1/gc"""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query

from . import space
from .auth import Asking
from .context import Ctx
from .deleting import collect, remove_dataset, remove_job
from .keyfile import Scope
from .problems import responses

router = APIRouter()

DryRun = Annotated[bool, Query(description="Only say what would be freed.")]


@router.delete(
    "/v1/jobs/{job_id}", tags=["jobs"], operation_id="delete_job", summary="Delete an ended job", responses=responses(404, 409, 422)
)
async def delete_job(job_id: str, ctx: Ctx, dry_run: DryRun = False) -> space.Deleted:
    """Its files and its ledger go. Refused while the job runs or is read. Files that another job shares by hard link stay there, and their
    bytes are not freed."""
    freed = await anyio.to_thread.run_sync(lambda: remove_job(ctx.catalog, job_id, dry_run=dry_run))
    return space.Deleted(deleted=not dry_run, dry_run=dry_run, files=freed.files, bytes=freed.bytes)


@router.delete(
    "/v1/datasets/{dataset_id}",
    tags=["datasets"],
    operation_id="delete_dataset",
    summary="Delete a dataset",
    responses=responses(404, 409, 422),
)
async def delete_dataset(
    dataset_id: str,
    ctx: Ctx,
    caller: Asking,
    dry_run: DryRun = False,
    force: Annotated[bool, Query(description="Though ended jobs name it, or it is being ingested.")] = False,
) -> space.Deleted:
    """A file that it was made of by path is not touched."""
    if force:
        caller.require(Scope.ADMIN, "force")
    freed = await anyio.to_thread.run_sync(lambda: remove_dataset(ctx.catalog, dataset_id, dry_run=dry_run, force=force))
    return space.Deleted(deleted=not dry_run, dry_run=dry_run, files=freed.files, bytes=freed.bytes)


@router.post("/v1/gc", tags=["service"], operation_id="collect_garbage", summary="Free what nobody needs", responses=responses(422))
async def collect_garbage(body: space.GcRequest, ctx: Ctx) -> space.Gc:
    """Always: what deletes left behind, objects that came into a bucket after their job was deleted, and files of ended jobs that their
    ledgers do not name (temps, superseded generations).
    With `states`: jobs that ended so, at least `older_than_s` ago, whole."""
    items = await anyio.to_thread.run_sync(lambda: collect(ctx.catalog, body.states, body.older_than_s, dry_run=body.dry_run))
    return space.Gc(dry_run=body.dry_run, files=sum(i.files for i in items), bytes=sum(i.bytes for i in items), items=items)
