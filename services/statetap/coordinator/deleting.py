"""Deleting jobs and datasets, and the clean-up. Runs in threads.

Invariant: nothing goes that runs, is read, or that a job needs to go on; what is asked about (dry run) is not touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

from ..contracts.errors import ErrorCode, RequestError, StatetapError
from ..contracts.layout import JOB
from ..contracts.records import JobState
from ..store.delete import Freed, clean_job, delete_dataset, delete_job, empty_trash, late_objects
from . import space
from .catalog import Catalog, ended, locked

log = logging.getLogger(__name__)


def remove_job(catalog: Catalog, job_id: str, *, dry_run: bool) -> Freed:
    """Delete an ended job.

    Raises:
        RequestError: ``not_found``; ``conflict`` for one that has not ended or is being read.
        StoreError: it cannot be removed.
    """
    catalog.job(job_id)
    # Under the lock that a retry takes too: a job that goes back to work is not deleted under it.
    with locked(catalog.job_path(job_id)):
        control = catalog.control(job_id)
        if not ended(control):
            raise RequestError(ErrorCode.CONFLICT, f"the job is {control.state}: cancel it first")
        freed = delete_job(catalog.job_path(job_id), dry_run=dry_run)
    if not dry_run:
        catalog.forget_job(job_id)
        log.info("%s: deleted, %d files, %d bytes freed", job_id, freed.files, freed.bytes)
    return freed


def remove_dataset(catalog: Catalog, dataset_id: str, *, dry_run: bool, force: bool) -> Freed:
    """Delete a dataset.

    Raises:
        RequestError: ``not_found``; ``conflict`` while a job that has not ended is made of it, and without ``force`` also while it is
            ingested, or an ended job names it (its rows could not be retried or verified against it any more).
        StoreError: it cannot be removed.
    """
    catalog.dataset(dataset_id)
    mine = [s.job_id for s in catalog.jobs() if s.dataset_id == dataset_id]
    mine += catalog.later_jobs()  # of which dataset they are cannot be told
    running = [i for i in mine if not ended(catalog.control(i))]
    if running:
        raise RequestError(ErrorCode.CONFLICT, f"jobs that have not ended are made of it: {_some(running)}")
    if not force and mine:
        raise RequestError(
            ErrorCode.CONFLICT, f"jobs are made of it: {_some(mine)}; delete them first, or use force (their rows cannot be retried then)"
        )
    if not force and catalog.report(dataset_id) is None:
        raise RequestError(ErrorCode.CONFLICT, "the dataset is being ingested; use force to delete it all the same")
    freed = delete_dataset(catalog.dataset_path(dataset_id), dry_run=dry_run)
    if not dry_run:
        catalog.forget_dataset(dataset_id)
        log.info("%s: deleted, %d files, %d bytes freed", dataset_id, freed.files, freed.bytes)
    return freed


def collect(catalog: Catalog, states: Iterable[JobState], older_than_s: float, *, dry_run: bool) -> list[space.Collected]:
    """Jobs in these ended states for so long, trash, and files of ended jobs that their ledgers do not name. Raises StoreError."""
    wanted = set(states)
    before = time.time() - older_than_s
    left = chain(empty_trash(catalog.store, dry_run=dry_run), late_objects(catalog.store, dry_run=dry_run))
    found = [space.Collected(kind="trash", name=name, **vars(freed)) for name, freed in left]
    for spec in list(catalog.jobs()):
        try:
            control = catalog.control(spec.job_id)
            if not ended(control):
                continue
            whole = control.state in wanted and control.ended_at <= before
            if whole:
                freed = remove_job(catalog, spec.job_id, dry_run=dry_run)
            else:
                freed = clean_job(catalog.job_path(spec.job_id), partial(_held, catalog, spec.job_id, control.revision), dry_run=dry_run)
        except StatetapError as e:
            if not (catalog.job_path(spec.job_id) / JOB).exists():  # deleted by another request meanwhile
                continue
            log.warning("%s: not cleaned up: %s", spec.job_id, e)
            continue
        if freed.files:
            found.append(space.Collected(kind="job" if whole else "unnamed_files", name=spec.job_id, **vars(freed)))
    return found


@contextmanager
def _held(catalog: Catalog, job_id: str, revision: int) -> Iterator[bool]:
    """Whether nothing has changed a job; nothing does, within the block. Raises RequestError, StoreError."""
    with locked(catalog.job_path(job_id)):
        yield catalog.control(job_id).revision == revision


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
