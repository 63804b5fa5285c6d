"""What the API answers, as frozen records.

Invariant: an unknown field is ignored and a field that a neighbouring version does not send has a default, so that client and
coordinator may differ by a version. Times are Unix times in seconds, sizes are bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Self

from ..contracts.records import EngineStart, JobState, Record

ENDED = frozenset(s.value for s in JobState if s.terminal)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def _convert(hint: Any, value: Any) -> Any:
    """Records inside records, lists and ``X | None``; everything else as it came."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and isinstance(value, list):
        return [_convert(args[0], v) for v in value]
    if origin in (typing.Union, types.UnionType) and value is not None:
        return _convert(next(a for a in args if a is not type(None)), value)
    if isinstance(hint, type) and issubclass(hint, Answer) and isinstance(value, dict):
        return hint.from_dict(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Answer(Record):
    """Base: from and to plain JSON, records inside records too."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Raises TypeError when a field without a default is missing."""
        return cls(**{name: _convert(hint, data[name]) for name, hint in _hints(typing.cast(Any, cls)).items() if name in data})


@dataclass(frozen=True, kw_only=True)
class Rows(Answer):
    """done + failed + skipped + open = total. ``reused``: of ``done``, taken by hard link from earlier jobs."""

    total: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0
    open: int = 0
    reused: int = 0

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.skipped


@dataclass(frozen=True, kw_only=True)
class Tokens(Answer):
    total: int = 0
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class Bytes(Answer):
    """``freed``: of the committed ones, given back after readers acknowledged them."""

    expected: int = 0
    committed: int = 0
    freed: int = 0


@dataclass(frozen=True, kw_only=True)
class Rates(Answer):
    """Over a sliding window of work really done."""

    rows_per_s: float = 0.0
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Batches(Answer):
    total: int = 0
    finished: int = 0
    outstanding: int = 0


@dataclass(frozen=True, kw_only=True)
class CapturedBy(Answer, EngineStart):
    """One start of an engine, and the done rows that it captured."""

    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Job(Answer):
    """A snapshot of a job. ``version`` grows whenever the snapshot changed (0: the coordinator does not number them)."""

    job_id: str
    dataset_id: str
    state: str
    name: str = ""
    profile_id: str = ""
    boundaries: list[int] = field(default_factory=list)
    encoding: str = "raw"
    positions: str = "all"
    priority: int = 0
    max_failed: int = 0
    reason: str = ""
    message: str = ""
    control: str = "run"
    rows: Rows = field(default_factory=Rows)
    tokens: Tokens = field(default_factory=Tokens)
    bytes: Bytes = field(default_factory=Bytes)
    errors: dict[str, int] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    eta_s: float | None = None
    bound: str = ""
    batches: Batches = field(default_factory=Batches)
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    path: str = ""
    samples: str | None = None
    engines: list[CapturedBy] = field(default_factory=list)
    version: int = 0

    @property
    def ended(self) -> bool:
        """Whether the state is terminal."""
        return self.state in ENDED


@dataclass(frozen=True, kw_only=True)
class Dataset(Answer):
    """``error`` has code and message when the state is ``failed``."""

    dataset_id: str
    state: str
    name: str = ""
    format: str = ""
    tokenizer: str = ""
    rows: int = 0
    accepted: int = 0
    rejected: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    max_tokens: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    content_hash: str = ""
    error: dict[str, str] | None = None
    sources: list[str] = field(default_factory=list)
    shuffle_seed: int | None = None
    created_at: float = 0.0
    updated_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Upload(Answer):
    """A resumable upload: bytes [0, offset) of ``size`` are durable."""

    upload_id: str
    filename: str = ""
    size: int = 0
    offset: int = 0
    expires_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RowError(Answer):
    """A row that failed or was skipped. ``line`` is 1-based in the source; ``file`` is the source of a row of a merged dataset."""

    row: int
    state: str = ""
    code: str = ""
    message: str = ""
    file: str | None = None
    line: int | None = None
    source_id: str | None = None
    retryable: bool = False
    next_step: str = ""
    generation: int = 0


@dataclass(frozen=True, kw_only=True)
class Row(Answer):
    """A row and its file. ``origin`` is ``<job>/<row>`` that a reused file was captured for."""

    row: int
    state: str
    generation: int = 0
    tokens: int = 0
    bytes: int = 0
    path: str = ""
    xxh3: str = ""
    code: str = ""
    message: str = ""
    origin: str = ""
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Engine(Answer):
    engine_id: str
    profile_id: str
    url: str = ""
    profile: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    worker_ids: list[str] = field(default_factory=list)
    tap_bytes: int = 0
    healthy: bool = False
    self_check: dict[str, Any] = field(default_factory=dict)
    registered_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SmallerJob(Answer):
    """A job that would fit: what to change (a sentence), and the field of the request and its value.

    Not ``fits``: ``bytes`` is an upper bound that does not; ``expected_bytes`` is what an earlier job lets one expect, where there is one.
    """

    change: str = ""
    field: str = ""
    value: Any = None
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    fits: bool = True
    exact: bool = True
    expected_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Store(Answer):
    """Bytes of the store's file system: free, and of them ``reserved`` for jobs that have not ended and ``kept_free`` always."""

    free: int = 0
    reserved: int = 0
    kept_free: int = 0
    samples: str | None = None  # s3://… where new jobs put their samples; None: on the store


@dataclass(frozen=True, kw_only=True)
class Estimate(Answer):
    """Bytes of a job against the store's space; an upper bound where not ``exact``. ``hours`` is null until a speed is known."""

    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    bytes: int = 0
    exact: bool = True
    expected_bytes: int | None = None
    free: int = 0
    reserved: int = 0
    kept_free: int = 0
    fits: bool = False
    missing: int = 0
    alternatives: list[SmallerJob] = field(default_factory=list)
    tokens_per_s: float | None = None
    hours: float | None = None


@dataclass(frozen=True, kw_only=True)
class Deleted(Answer):
    """``bytes`` are those that were really freed, or would be."""

    deleted: bool = False
    dry_run: bool = False
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CollectedItem(Answer):
    kind: str = ""
    name: str = ""
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Collected(Answer):
    dry_run: bool = True
    files: int = 0
    bytes: int = 0
    items: list[CollectedItem] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Acked(Answer):
    rows: int = 0
    bytes_freed: int = 0


@dataclass(frozen=True, kw_only=True)
class Health(Answer):
    status: str = ""


@dataclass(frozen=True, kw_only=True)
class Service(Answer):
    service: str = ""
    version: str = ""
    links: dict[str, str] = field(default_factory=dict)
