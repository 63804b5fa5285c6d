"""``run_batch``: the RQ task, in a horse of its own. Takes the batch's lease, resumes, runs, hands back.

Invariant: however it ends, short of a SIGKILL, the lease is given back, the tap folder is gone and what was committed is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from ..contracts.capture import NORM_FILE, new_lease
from ..contracts.errors import EngineError, ErrorCode, RequestError, StoreError
from ..contracts.layout import NORM, ROWS, dataset_dir, job_dir
from ..contracts.records import Batch, Control, JobSpec, PauseReason
from ..store.fs import create_file
from ..store.jobs import load_job
from ..store.plan import read_plan
from ..store.rows import RowsFile
from . import drain
from .batch import REDIS_GRACE_S, BatchRun
from .context import Context, current
from .lease import YIELD, BatchKeys, connect, remove_lease_folder

log = logging.getLogger(__name__)

_PAUSES = frozenset(r.value for r in PauseReason)


def run_batch(job_id: str, batch: int, attempt: int) -> None:
    """Do what is open of a batch. Rows that are left open are the next attempt's; an exception says why none could be done."""
    context = current()
    profile_id = context.ready.profile.profile_id
    lease = new_lease()
    client = connect(context.settings.redis_url.get_secret_value())
    batch_keys = BatchKeys(client, profile_id=profile_id, job_id=job_id, batch=batch, attempt=attempt, lease=lease)
    deadline = time.monotonic() + REDIS_GRACE_S
    started = time.monotonic()
    if not batch_keys.call("lease", batch_keys.begin, lambda: drain.requested() or time.monotonic() > deadline):
        log.info("event=batch_left job=%s batch=%d attempt=%d reason=lease_held", job_id, batch, attempt)
        return
    log.info("event=batch_started job=%s batch=%d attempt=%d lease=%s", job_id, batch, attempt, lease)
    try:
        summary = _run(context, job_id, batch, lease, batch_keys)
        log.info(
            "event=batch_ended job=%s batch=%d attempt=%d seconds=%.2f %s", job_id, batch, attempt, time.monotonic() - started, summary
        )
    finally:
        remove_lease_folder(context.settings.tap / lease)
        grace = time.monotonic() + (context.settings.drain_s if drain.requested() else REDIS_GRACE_S)
        batch_keys.call("end", batch_keys.end, lambda: time.monotonic() > grace)
        client.close()


def _run(context: Context, job_id: str, number: int, lease: str, batch_keys: BatchKeys) -> str:
    if drain.requested() or (control := batch_keys.control()) not in (Control.RUN.value, YIELD):
        return f"reason={'drain' if drain.requested() else control}"
    folder = context.settings.store / job_dir(job_id)
    try:
        spec = load_job(folder)
        plan = read_plan(folder)
        if not 0 <= number < len(plan):
            raise RequestError(ErrorCode.NOT_FOUND, f"job {job_id} has no batch {number}")
        with contextlib.closing(RowsFile(context.settings.store / dataset_dir(spec.dataset_id) / ROWS)) as rows:
            return asyncio.run(_run_async(context, spec, folder, plan[number], lease, rows, batch_keys))
    except StoreError as e:
        full = e.code is ErrorCode.STORE_FULL
        batch_keys.pause(PauseReason.LOW_DISK if full else PauseReason.CIRCUIT_OPEN, str(e))
        raise


async def _run_async(context: Context, spec: JobSpec, folder: Path, batch: Batch, lease: str, rows: RowsFile, batch_keys: BatchKeys) -> str:
    _keep_norm(context, folder)
    run = BatchRun(context, spec, folder, batch, lease, rows, batch_keys)
    resumed = await run.run()
    if run.reason in _PAUSES:
        batch_keys.pause(
            PauseReason(run.reason),
            run.message,
            code=run.circuit.code if run.reason == PauseReason.CIRCUIT_OPEN and run.circuit.is_open else "",
        )
    t = run.tally.totals()
    return (
        f"reason={run.reason or 'all_rows'} done={t.done} failed={t.failed} skipped={t.skipped} open={batch.rows - t.rows} "
        f"resumed={len(resumed.records)} reused={resumed.reused} adopted={resumed.adopted} swept={resumed.swept}"
    )


def _keep_norm(context: Context, folder: Path) -> None:
    """The final norm's weight into the job folder, once, so that readers derive post from pre. Raises EngineError, StoreError."""
    if context.ready.profile.final not in ("pre", "both") or (folder / NORM).exists():
        return
    try:
        data = (context.settings.tap / NORM_FILE).read_bytes()
    except FileNotFoundError:
        raise EngineError(ErrorCode.PROTOCOL_MISMATCH, f"the engine is READY, but there is no {NORM_FILE} in the tap") from None
    create_file(folder / NORM, data)
