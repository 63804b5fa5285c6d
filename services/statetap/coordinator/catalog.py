"""Datasets and jobs as they stand on the store, with what never changes cached; the one place that changes control.json.

Invariant: job.json, dataset.json and the report of a ready dataset never change, so they are read once. control.json is read
again when its mtime changed, and changed only under a lock on the job's folder, so that a person's wish and the reconciler's
state cannot overwrite each other, not even from two coordinators.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.layout import ACKS, CONTROL, DATASET_SPEC, DATASETS, JOB, JOBS, PLAN, REPORT, dataset_dir, job_dir
from ..contracts.records import DatasetSpec, DatasetState, DatasetStatus, JobControl, JobSpec, JobState
from ..store.acks import NONE, Acks, load_acks
from ..store.fs import read_json, store_error
from ..store.jobs import load_control, load_job, save_control
from ..store.plan import read_plan
from .totals import PlanIndex

log = logging.getLogger(__name__)


class Catalog:
    """Thread-safe. Memory grows with jobs and datasets (some KB each), never with rows."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._jobs: dict[str, JobSpec] = {}
        self._later: set[str] = set()  # jobs of a later schema version
        self._controls: dict[str, tuple[tuple[int, int], JobControl]] = {}
        self._plans: dict[str, PlanIndex] = {}
        self._acks: dict[str, tuple[tuple[int, int], Acks]] = {}
        self._datasets: dict[str, DatasetSpec] = {}
        self._reports: dict[str, DatasetStatus] = {}

    # jobs

    def job_path(self, job_id: str) -> Path:
        return self.store / job_dir(job_id)

    def job_ids(self) -> list[str]:
        """All acknowledged jobs, sorted by id. Of known jobs no file is looked at: their job.json is never removed alone.

        Those that were found to be of a later schema version are left out: they must not hold up the others.
        """
        present = {n for n in _listdir(self.store / JOBS) if not n.startswith(".")}  # not the trash
        with self._lock:
            gone = (self._jobs.keys() | self._later) - present
            for job_id in gone:
                self._drop(job_id)
            known, later = set(self._jobs), set(self._later)
        new = [i for i in present - known - later if (self.job_path(i) / JOB).exists() and (self.job_path(i) / PLAN).exists()]
        return sorted([*known, *new])

    def job(self, job_id: str) -> JobSpec:
        """Raises RequestError ``not_found``, StoreError."""
        held = self._jobs.get(job_id)
        if held is not None:
            return held
        if not _is_name(job_id):
            raise RequestError(ErrorCode.NOT_FOUND, f"no job {job_id!r}")
        try:
            spec = load_job(self.job_path(job_id))
        except RequestError:
            raise RequestError(ErrorCode.NOT_FOUND, f"no job {job_id!r}") from None
        except StoreError as e:
            if e.code is ErrorCode.PROTOCOL_MISMATCH:
                with self._lock:
                    self._later.add(job_id)
            raise
        except TypeError as e:
            raise StoreError(ErrorCode.STORE_IO, f"{self.job_path(job_id) / JOB} is not a job: {e}") from e
        with self._lock:
            self._jobs[job_id] = spec
        return spec

    def jobs(self) -> Iterator[JobSpec]:
        """Specs of all jobs but :meth:`later_jobs`, newest first. A folder that cannot be read raises StoreError."""
        specs = []
        for job_id in self.job_ids():
            try:
                specs.append(self.job(job_id))
            except StoreError as e:
                if e.code is not ErrorCode.PROTOCOL_MISMATCH:
                    raise
                log.warning("%s: left out: %s", job_id, e)
        yield from sorted(specs, key=lambda s: (s.created_at, s.job_id), reverse=True)

    def later_jobs(self) -> list[str]:
        """Ids of jobs of a later schema version, that :meth:`jobs` left out."""
        with self._lock:
            return sorted(self._later)

    def control(self, job_id: str) -> JobControl:
        """control.json, read again only when it was replaced. Raises RequestError ``not_found``, StoreError."""
        path = self.job_path(job_id) / CONTROL
        try:
            found = os.stat(path)
        except FileNotFoundError:  # deleted, perhaps by another coordinator
            self.forget_job(job_id)
            raise RequestError(ErrorCode.NOT_FOUND, f"no job {job_id!r}") from None
        except OSError as e:
            if not path.parent.exists():  # deleted since it was listed
                raise RequestError(ErrorCode.NOT_FOUND, f"no job {job_id!r}") from None
            raise store_error(e, f"read {CONTROL} of {job_id}") from e
        # The inode too: two changes can fall within one tick of the file system's clock.
        version = found.st_mtime_ns, found.st_ino
        held = self._controls.get(job_id)
        if held is not None and held[0] == version:
            return held[1]
        control = load_control(path.parent)
        with self._lock:
            self._controls[job_id] = version, control
        return control

    def acks(self, job_id: str) -> Acks:
        """What readers have acknowledged, read again only when it was replaced."""
        path = self.job_path(job_id) / ACKS
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return NONE
        except OSError as e:
            raise store_error(e, f"read {ACKS} of {job_id}") from e
        version = found.st_mtime_ns, found.st_ino
        held = self._acks.get(job_id)
        if held is None or held[0] != version:
            held = version, load_acks(path.parent)
            with self._lock:
                self._acks[job_id] = held
        return held[1]

    def freed_bytes(self, job_id: str) -> int:
        """Bytes of acknowledged rows, as :meth:`acks` saw them last. Does not block."""
        held = self._acks.get(job_id)
        return held[1].bytes if held is not None else 0

    def change_control(self, job_id: str, change: Callable[[JobControl], JobControl]) -> JobControl:
        """Replace control.json by ``change`` of what it is now, under the folder's lock; written only when it differs.

        Exceptions of ``change`` pass through and nothing is written.
        """
        path = self.job_path(job_id)
        with locked(path):
            before = load_control(path)
            after = change(before)
            if after == before:
                return before
            after = JobControl.from_dict(after.to_dict() | {"updated_at": time.time(), "revision": before.revision + 1})
            save_control(path, after)
        return after

    def plan(self, job_id: str) -> PlanIndex:
        """The plan's row ranges. Kept until :meth:`forget_plan`."""
        held = self._plans.get(job_id)
        if held is None:
            held = PlanIndex(read_plan(self.job_path(job_id)))
            with self._lock:
                self._plans[job_id] = held
        return held

    def forget_plan(self, job_id: str) -> None:
        with self._lock:
            self._plans.pop(job_id, None)

    def forget_job(self, job_id: str) -> None:
        """It was deleted."""
        with self._lock:
            self._drop(job_id)

    def _drop(self, job_id: str) -> None:
        self._later.discard(job_id)
        for cache in (self._jobs, self._controls, self._plans, self._acks):
            cache.pop(job_id, None)

    def forget_dataset(self, dataset_id: str) -> None:
        """It was deleted."""
        with self._lock:
            self._datasets.pop(dataset_id, None)
            self._reports.pop(dataset_id, None)

    def profile(self, profile_id: str) -> dict[str, object] | None:
        """A capture profile as some job on the store has it."""
        for spec in self.jobs():
            if spec.capture_profile.profile_id == profile_id:
                return spec.profile
        return None

    # datasets

    def dataset_path(self, dataset_id: str) -> Path:
        return self.store / dataset_dir(dataset_id)

    def dataset_ids(self) -> list[str]:
        """All acknowledged datasets, sorted by id."""
        present = {n for n in _listdir(self.store / DATASETS) if not n.startswith(".")}
        with self._lock:
            for dataset_id in self._datasets.keys() - present:
                self._datasets.pop(dataset_id, None)
                self._reports.pop(dataset_id, None)
            known = set(self._datasets)
        return sorted([*known, *(i for i in present - known if (self.dataset_path(i) / DATASET_SPEC).exists())])

    def dataset(self, dataset_id: str) -> DatasetSpec:
        """Raises RequestError ``not_found``, StoreError."""
        held = self._datasets.get(dataset_id)
        if held is not None:
            return held
        data = read_json(self.dataset_path(dataset_id) / DATASET_SPEC) if _is_name(dataset_id) else None
        if data is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"no dataset {dataset_id!r}")
        try:
            spec = DatasetSpec.from_dict(data)
        except TypeError as e:
            raise StoreError(ErrorCode.STORE_IO, f"{self.dataset_path(dataset_id) / DATASET_SPEC} is not a dataset: {e}") from e
        with self._lock:
            self._datasets[dataset_id] = spec
        return spec

    def datasets(self) -> Iterator[DatasetSpec]:
        """Specs of all datasets, newest first."""
        yield from sorted(map(self.dataset, self.dataset_ids()), key=lambda s: (s.created_at, s.dataset_id), reverse=True)

    def report(self, dataset_id: str) -> DatasetStatus | None:
        """report.json, or None while there is none. That of a ready dataset is final; a failed one may be ingested again."""
        held = self._reports.get(dataset_id)
        if held is not None:
            return held
        data = read_json(self.dataset_path(dataset_id) / REPORT)
        if data is None:
            return None
        try:
            status = DatasetStatus.from_dict(data)
        except TypeError as e:
            raise StoreError(ErrorCode.STORE_IO, f"{self.dataset_path(dataset_id) / REPORT} is not a report: {e}") from e
        if status.state == DatasetState.READY:
            with self._lock:
                self._reports[dataset_id] = status
        return status


def ended(control: JobControl) -> bool:
    return JobState(control.state).terminal


def _is_name(text: str) -> bool:
    """An id that is one path component of ours, so that no request reaches another folder."""
    return 0 < len(text) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_") for c in text)


def _listdir(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except FileNotFoundError:
        return set()
    except OSError as e:
        raise store_error(e, f"list {path.name}") from e


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """An exclusive lock on a job's folder, across threads and processes; it goes with the descriptor."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RequestError(ErrorCode.NOT_FOUND, f"no job {folder.name!r}") from None
    except OSError as e:
        raise store_error(e, f"lock {folder.name}") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
