"""Names of everything in Redis. Redis holds references, leases and totals, never tensors, token ids or the only copy of a truth."""

from __future__ import annotations

from . import SCHEMA_VERSION

# Of a batch; refreshed by a thread of the horse. A killed worker's rows run again after this, a tick and a start: within 15 s on a slow machine too.
LEASE_TTL_S = 8.0
LEASE_REFRESH_S = 2.0
ENGINE_TTL_S = 15.0
INGEST_LOCK_TTL_S = 15.0  # of `ingesting`; refreshed by a thread of the ingestion
INGEST_QUEUE = "statetap:ingest"
INGEST_STARTS = "statetap:ingest-starts"  # hash dataset id -> starts that left no report and were not stopped in order
BATCH_TASK = "statetap.worker.task.run_batch"
INGEST_TASK = "statetap.datasets.task.run_ingest"


def queue(profile_id: str) -> str:
    """RQ queue of a profile: a worker of another schema version never sees it."""
    return f"statetap:v{SCHEMA_VERSION}:{profile_id}"


def engine(profile_id: str, worker_id: str) -> str:
    """JSON EngineInfo of the engine beside this worker, with ENGINE_TTL_S.

    A worker of another schema version is none that could serve a job: its record has another name.
    """
    return f"statetap:engine:v{SCHEMA_VERSION}:{profile_id}:{worker_id}"


ENGINES_PATTERN = f"statetap:engine:v{SCHEMA_VERSION}:*"


def lease(job_id: str, batch: int) -> str:
    """Holder (attempt's lease id) of a batch, with LEASE_TTL_S."""
    return f"statetap:lease:{job_id}:{batch}"


def outstanding(profile_id: str) -> str:
    """Hash ``job:batch`` -> JSON {attempt, rq_id, enqueued_at, started, lost, missing_at}: batches given out and not handed back.

    The reconciler adds a field when it enqueues (``lost``: because the last attempt was lost; ``missing_at``: when it was first seen to have left
    its queue without a start, so that a coordinator that is started again goes on counting); the horse sets ``started`` when it has the
    lease and deletes the field when it ends.
    """
    return f"statetap:outstanding:{profile_id}"


def attempts(job_id: str) -> str:
    """Hash batch -> number of attempts so far."""
    return f"statetap:attempts:{job_id}"


def totals(job_id: str) -> str:
    """Hash batch -> JSON BatchTotals."""
    return f"statetap:totals:{job_id}"


def control(job_id: str) -> str:
    """String Control: a copy of control.json for the horses."""
    return f"statetap:control:{job_id}"


def inflight(job_id: str, batch: int) -> str:
    """Set of rows sent and not answered: what a lost horse leaves behind names the suspects."""
    return f"statetap:inflight:{job_id}:{batch}"


def suspects(job_id: str, batch: int) -> str:
    """Set of rows that were in flight at a loss and have to run alone."""
    return f"statetap:suspects:{job_id}:{batch}"


def losses(job_id: str) -> str:
    """Hash row -> losses at which it was *alone* in flight."""
    return f"statetap:losses:{job_id}"


def pause(job_id: str) -> str:
    """JSON {reason, message, at}, with a TTL: a horse met low_disk or engine_down and handed its batch back."""
    return f"statetap:pause:{job_id}"


def give_way(job_id: str, batch: int, attempt: int) -> str:
    """Set, with a TTL, when this attempt shall commit what is in flight and hand the rest back: another job has no worker."""
    return f"statetap:yield:{job_id}:{batch}:{attempt}"


def streak(job_id: str) -> str:
    """JSON {code, rows}: the last rows that got an outcome all failed with this code. A worker's batch begins where the last one ended."""
    return f"statetap:streak:{job_id}"


def bound(job_id: str) -> str:
    """Hash worker id -> JSON {at, prefill, d2h, tap, commit}: seconds of the last window that its feeder waited for each."""
    return f"statetap:bound:{job_id}"


def dataset(dataset_id: str) -> str:
    """JSON DatasetStatus: progress of an ingestion, with a TTL."""
    return f"statetap:dataset:{dataset_id}"


def known(job_id: str) -> str:
    """Set once the totals of a job stand in this Redis; gone with a wipe, which tells the reconciler to fold the ledger again."""
    return f"statetap:known:{job_id}"


def ingesting(dataset_id: str) -> str:
    """Lock of the process that ingests this dataset, with a TTL that it refreshes."""
    return f"statetap:ingesting:{dataset_id}"


def ingest_claim(dataset_id: str) -> str:
    """SET NX with a TTL of seconds by the reconciler that enqueues this ingestion, so that two loops enqueue it once."""
    return f"statetap:ingest-claim:{dataset_id}"


def rq_id(job_id: str, batch: int, attempt: int) -> str:
    """RQ's job id: letters, digits, - and _ only (RQ 2.12 refuses others)."""
    return f"{job_id}-{batch}-{attempt}"
