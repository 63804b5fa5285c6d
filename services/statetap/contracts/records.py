"""Records that pass between services, and the states that datasets, jobs and rows have.

All are frozen, keyword-only and turn into plain JSON. ``rows`` are positions in the user's source (0-based, empty lines not
counted), or in all sources one after the other, or in their shuffled order; all ranges are half-open.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

from . import SCHEMA_VERSION
from .positions import ALL
from .profile import CaptureProfile
from .sample_format import Encoding, SampleFormat


class DatasetState(StrEnum):
    INGESTING = "ingesting"
    READY = "ready"
    FAILED = "failed"


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    COMPLETED_WITH_ERRORS = "completed_with_errors"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS, JobState.CANCELLED, JobState.FAILED)


class PauseReason(StrEnum):
    """Why a job is paused. ``user`` is ended by resume, the others, where nothing else is said, by themselves when the cause is gone."""

    USER = "user"
    LOW_DISK = "low_disk"
    ENGINE_DOWN = "engine_down"
    NO_ENGINE = "no_engine"
    CIRCUIT_OPEN = "circuit_open"  # row after row failed with one cause; ended by resume or retry
    STORE_FULL = "store_full"  # a job with retain=until_read has as many bytes as it may keep: it goes on when some are read


class RowState(StrEnum):
    """Terminal states of a row. A row without a record is open."""

    DONE = "done"
    FAILED = "failed"  # attempted, and given up
    SKIPPED = "skipped"  # never sent: the row itself does not allow it


class Retain(StrEnum):
    """How long a job's files are kept."""

    ALL = "all"
    UNTIL_READ = "until_read"  # freed when a reader acknowledges them


class Bound(StrEnum):
    """What holds a job up now, as its workers see it (``""``: nothing is known)."""

    PREFILL = "prefill"  # the window is full and the engine computes
    D2H = "d2h"  # the engine has computed; its copies and tap files are waited for
    TAP = "tap"  # no free bytes in the tap
    COMMIT = "commit"  # rows wait for check and commit
    NO_ENGINE = "no_engine"


class Control(StrEnum):
    """What a person wants of a job; horses read it each second."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base: to and from plain JSON. Unknown keys are ignored, so that a newer writer can add some."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        # Not fields(): a job of a million rows has a million of these, and its resume reads them all.
        return cls(**{k: v for k, v in data.items() if k in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(Record):
    """What a dataset is made from. ``path`` is the source file, or "" where ``sources`` names several, which are merged in this order;
    ``tokenizer`` a model folder or hub id ("" for tokenised rows)."""

    dataset_id: str
    name: str
    path: str
    format: str = "auto"  # auto | messages | sharegpt | tokenized
    tokenizer: str = ""
    trust_remote_code: bool = False
    max_length: int = 0  # 0: none; longer rows are truncated at ingestion only when truncate is set, otherwise rejected
    truncate: bool = False
    sources: list[str] = field(default_factory=list)
    shuffle_seed: int | None = None  # all rows permuted (datasets/permutation.py); None: in the order of the sources
    created_at: float = 0.0

    @property
    def files(self) -> list[str]:
        return self.sources or [self.path]

    @cached_property
    def labels(self) -> list[str]:
        """Each source by its name, or as much of its path as tells it from the others."""
        left, found, depth = {p: p.split("/") for p in self.sources}, dict[str, str](), 0
        while left:
            depth += 1
            short = {p: "/".join(parts[-depth:]) for p, parts in left.items()}
            counts = Counter(short.values())
            found |= {p: s for p, s in short.items() if counts[s] == 1 or depth >= len(left[p])}
            left = {p: parts for p, parts in left.items() if p not in found}
        return [found[p] for p in self.sources]

    def place(self, source: int, line: int, unit: str = "line") -> str:
        """Where a row stands, for a person: ``line 3``, or of several sources ``train.jsonl:3``."""
        return f"{self.labels[source]}:{line}" if self.sources else f"{unit} {line}"


@dataclass(frozen=True, kw_only=True)
class DatasetStatus(Record):
    """``report.json`` when ingestion ended; the same record with state ``ingesting`` is its progress."""

    dataset_id: str
    state: str
    rows: int = 0  # source rows seen, good or bad
    accepted: int = 0  # rows that a job would prefill
    rejected: int = 0  # rows with an error code; they become ``skipped`` in a job
    tokens: int = 0
    supervised_tokens: int = 0
    max_tokens: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # code -> rows
    examples: list[dict[str, Any]] = field(default_factory=list)  # the first bad rows: row, line, code, message
    content_hash: str = ""  # xxh3-128 over ids and masks of all rows, in order
    error: dict[str, str] | None = None  # code, message when state is failed
    updated_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class JobSpec(Record):
    """``job.json``: never changes after it was written; resume refuses on a difference."""

    job_id: str
    dataset_id: str
    content_hash: str
    profile: dict[str, Any]  # CaptureProfile.to_dict()
    rows: int
    tokens: int
    bytes: int  # of the files if every accepted row is done: exact, but for zstd an upper bound
    batches: int
    name: str = ""
    priority: int = 0
    max_failed: int = 0
    max_length: int = 0  # longer rows are skipped; 0: what the engine takes
    boundaries: list[int] = field(default_factory=list)  # that are kept, in this order; none named: all that are captured
    encoding: str = Encoding.RAW.value
    positions: str = ALL
    reuse_from: list[str] = field(default_factory=list)  # jobs whose files may be taken by hard link, newest first
    retain: str = Retain.ALL.value
    retain_bytes: int = 0  # with until_read: pause when so many bytes are not yet read
    samples: str = ""  # s3://bucket/prefix/job of its sample files; "": they stand in the job's folder
    created_at: float = 0.0
    schema_version: int = SCHEMA_VERSION

    @property
    def capture_profile(self) -> CaptureProfile:
        return CaptureProfile.from_dict(self.profile)

    @cached_property
    def profile_id(self) -> str:
        return self.capture_profile.profile_id

    @cached_property
    def sample_format(self) -> SampleFormat:
        return SampleFormat(self.capture_profile, tuple(self.boundaries), self.encoding, self.positions)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that is sent."""
        most = int(self.profile["max_length"])
        return min(most, self.max_length) if self.max_length else most


@dataclass(frozen=True, kw_only=True)
class JobControl(Record):
    """``control.json``: the part of a job that a person or the reconciler changes; replaced atomically."""

    control: str = Control.RUN.value
    state: str = JobState.QUEUED.value
    reason: str = ""  # a PauseReason, or an error code when failed
    message: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    updated_at: float = 0.0
    revision: int = 0  # counts the changes of this file
    final: dict[str, Any] = field(default_factory=dict)  # of an ended job: done, failed, skipped, tokens, bytes, errors, finished


@dataclass(frozen=True, kw_only=True)
class Batch(Record):
    """Rows [start, stop) of a job. ``tokens`` counts accepted rows only."""

    batch: int
    start: int
    stop: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Retry(Record):
    """``retries/<generation>.json``: rows that ended without a file before ``generation`` are open again and are written with it.

    ``codes``: only rows with one of these error codes; none: all that failed (skipped rows only where their code is named).
    ``rows``: a repair: exactly the rows of these half-open ranges, sorted and apart, done ones too; an empty list opens none, and
    COMPLETE is written anew all the same.
    """

    generation: int
    codes: list[str] = field(default_factory=list)
    rows: list[list[int]] | None = None
    at: float = 0.0


_RANKS = {"skipped": 0, "failed": 1, "done": 2}


@dataclass(frozen=True, kw_only=True)
class RowRecord(Record):
    """One ledger line. ``xxh3`` is xxh3-64 of the whole file, ``path`` is relative to the job folder."""

    row: int
    state: str
    generation: int = 0
    tokens: int = 0
    bytes: int = 0
    path: str = ""
    xxh3: str = ""
    code: str = ""
    message: str = ""
    origin: str = ""  # ``<job>/<row>`` that the file was captured for, when it was taken from an earlier job
    engine: str = ""  # EngineStart.boot_id of the engine that captured a done row; stands in a line only where it is not the segment's
    at: float = 0.0

    @property
    def rank(self) -> tuple[int, int]:
        """The highest wins. Within a generation a file that is there beats a failure that another worker saw."""
        return self.generation, _RANKS[self.state]


UNKNOWN_ENGINE = "?"  # of a row whose file an earlier attempt left without a line


@dataclass(frozen=True, kw_only=True)
class EngineStart(Record):
    """One start of an engine. A ledger segment names it before the rows that were captured by it: ``{"engine": {…}}``."""

    boot_id: str
    engine_id: str = ""
    sglang_version: str = ""
    plugin_version: str = ""


@dataclass(frozen=True, kw_only=True)
class BatchTotals(Record):
    """Absolute totals of one batch, published after the ledger's fsync. Never increments: publishing twice does no harm."""

    batch: int
    done: int = 0
    failed: int = 0
    skipped: int = 0
    tokens: int = 0  # of done rows
    bytes: int = 0  # of committed files
    reused: int = 0  # of the done rows: taken from earlier jobs, not prefilled
    reused_tokens: int = 0
    reused_bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # code -> rows, failed and skipped

    @property
    def rows(self) -> int:
        return self.done + self.failed + self.skipped


@dataclass(frozen=True, kw_only=True)
class EngineInfo(Record):
    """What the worker beside an engine registers, with a TTL."""

    engine_id: str
    url: str
    profile_id: str
    profile: dict[str, Any]
    workers: int = 1
    worker_ids: list[str] = field(default_factory=list)
    tap_bytes: int = 0
    healthy: bool = True
    self_check: dict[str, Any] = field(default_factory=dict)
    registered_at: float = 0.0
