"""One dataset: source file -> rows.arrow and report.json.

Invariant: row r of rows.arrow is row r of the source, good or bad; rows.arrow appears whole, and report.json after it, so a
dataset with a report is finished and one without is begun again from nothing, with the same result. Memory is that of one
record batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from ..contracts.errors import ErrorCode, RequestError, RowError, StatetapError
from ..contracts.layout import REPORT, ROWS, ROWS_PER_RECORD_BATCH, TEMP_PREFIX, dataset_dir, temp
from ..contracts.records import DatasetSpec, DatasetState, DatasetStatus
from ..store.fs import create_file, fsync_dir, make_dirs, read_json, remove, store_error, to_json
from ..store.rows import SCHEMA
from .formats import Source
from .kinds import KINDS, Conversation, Tokens, detect, parse, source_id

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 100
PROGRESS_EVERY_S = 0.5
_GROUP_CHARS = 2 << 20  # of conversations tokenised in one call: bounds the offsets held at once


class StoppedError(Exception):
    """The process was asked to end, or another one is at this dataset."""


@dataclass(kw_only=True)
class _Row:
    """A source row on its way; ``content`` ends as Tokens or RowError."""

    line: int
    source_id: str
    content: Tokens | Conversation | RowError


def ingest(
    spec: DatasetSpec, store: Path, on_progress: Callable[[DatasetStatus], None], stop: Callable[[], bool] = lambda: False
) -> DatasetStatus:
    """Ingest ``spec`` and return its report, which is on the store when this returns; a report that is there is returned as it is.

    ``on_progress`` gets the status at most twice a second; ``stop`` is asked once a record batch.

    Raises:
        StoppedError: ``stop`` said so, or another process took the dataset over; no report was written.
        StoreError: the report itself could not be written.
    """
    folder = store / dataset_dir(spec.dataset_id)
    if (report := read_json(folder / REPORT)) is not None:
        return DatasetStatus.from_dict(report)
    make_dirs(folder)
    for name in os.listdir(folder):
        if name.startswith(TEMP_PREFIX) and name.endswith(ROWS):
            remove(folder / name)
    run = _Run(spec, folder, on_progress, stop)
    try:
        run.write()
        status = run.status(DatasetState.READY)
    except StoppedError:
        raise
    except StatetapError as e:
        status = run.status(DatasetState.FAILED, e)
    except OSError as e:
        status = run.status(DatasetState.FAILED, store_error(e, "ingest"))
    except MemoryError:
        status = run.status(DatasetState.FAILED, RequestError(ErrorCode.DATASET_FAILED, f"out of memory near {run.place}"))
    except Exception as e:  # a tokenizer's own code raises anything; the dataset must not stay in ``ingesting``
        logger.exception("ingestion of %s failed near %s", spec.dataset_id, run.place)
        status = run.status(DatasetState.FAILED, StatetapError(ErrorCode.INTERNAL, f"near {run.place}: {type(e).__name__}: {e}"))
    return report_once(folder, status)


def report_once(folder: Path, status: DatasetStatus) -> DatasetStatus:
    """Write report.json unless there is one; the one that counts is returned. Raises StoreError."""
    if create_file(folder / REPORT, to_json(status.to_dict())):
        return status
    return DatasetStatus.from_dict(read_json(folder / REPORT) or {})


@dataclass
class _Run:
    """The state of one ingestion."""

    spec: DatasetSpec
    folder: Path
    on_progress: Callable[[DatasetStatus], None]
    stop: Callable[[], bool]
    rows: int = 0
    accepted: int = 0
    tokens: int = 0
    supervised: int = 0
    longest: int = 0
    place: str = "the beginning"
    errors: dict[str, int] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kind = "" if self.spec.format == "auto" else self.spec.format
        self.unit = "line"
        self.bytes_read = self.bytes_total = 0
        self._hash = xxhash.xxh3_128()
        self._next_progress = 0.0
        self._masker: Any = None  # a mask.Masker; its module imports transformers, which tokenised rows do not need

    # -- the whole file

    def write(self) -> None:
        """Write rows.arrow. Raises RequestError, StoreError, OSError or StoppedError; then nothing is left behind."""
        if self.kind and self.kind not in KINDS:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"format: {self.kind!r} is none of auto, {', '.join(KINDS)}")
        tmp = Path(temp(str(self.folder / ROWS), secrets.token_hex(8)))
        with contextlib.ExitStack() as cleanup:
            source = cleanup.enter_context(Source(Path(self.spec.path)))
            if self.spec.tokenizer:
                self._load_tokenizer()
            cleanup.callback(remove, tmp)
            with open(tmp, "xb") as file:
                with pa.ipc.new_file(file, SCHEMA) as writer:
                    for batch in self._batches(source):
                        writer.write_batch(self._record_batch(batch))
                        self._progress(source)
                file.flush()
                os.fsync(file.fileno())
            if self.accepted == 0:
                raise self._no_good_row()
            if self.stop():
                raise StoppedError("asked to stop")
            try:
                os.replace(tmp, self.folder / ROWS)
            except FileNotFoundError:
                raise StoppedError(f"another process is at dataset {self.spec.dataset_id}") from None
            fsync_dir(self.folder)

    def _no_good_row(self) -> RequestError:
        if self.rows == 0:
            return RequestError(ErrorCode.DATASET_FAILED, f"{self.spec.path} has no rows")
        counts = ", ".join(f"{code} {n}" for code, n in sorted(self.errors.items()))
        code = ErrorCode(max(self.errors, key=lambda c: self.errors[c]))
        return RequestError(code, f"none of the {self.rows} rows is good ({counts}); the first: {self.examples[0]['message']}")

    def _batches(self, source: Source) -> Iterator[list[_Row]]:
        """The rows in groups of exactly ROWS_PER_RECORD_BATCH (the last may be shorter), tokenised."""
        batch: list[_Row] = []
        waiting, chars = 0, 0  # conversations at the end of ``batch`` that are not tokenised yet
        for line, value in source:
            self.unit = source.unit
            row = self._parse(line, value)
            batch.append(row)
            if isinstance(row.content, Conversation):
                waiting, chars = waiting + 1, chars + sum(len(m["content"]) for m in row.content.messages)
            full = len(batch) == ROWS_PER_RECORD_BATCH
            if waiting and (full or chars > _GROUP_CHARS):
                self._tokenize(batch)
                waiting, chars = 0, 0
            if full:
                yield batch
                batch = []
        if batch:
            self._tokenize(batch)
            yield batch

    # -- one row

    def _parse(self, line: int, value: dict[str, Any] | RowError) -> _Row:
        self.place = f"{self.unit} {line}"
        if isinstance(value, RowError):
            return _Row(line=line, source_id=str(line), content=value)
        content: Tokens | Conversation | RowError
        try:
            kind = self.kind or detect(value)
            content = parse(kind, value, self._masker.vocab_size if self._masker else None)
            if not self.kind:
                self.kind = kind
                logger.info("dataset %s: rows are %s, by %s", self.spec.dataset_id, kind, self.place)
        except RowError as e:
            content = e
        if isinstance(content, Conversation) and self._masker is None:
            raise RequestError(ErrorCode.DATASET_FAILED, f"{self.place} is a conversation: a tokenizer has to be named")
        return _Row(line=line, source_id=source_id(value, line), content=content)

    def _load_tokenizer(self) -> None:
        from .mask import Masker  # imports transformers, which tokenised rows do not need

        self._masker = Masker(self.spec.tokenizer, trust_remote_code=self.spec.trust_remote_code)

    def _tokenize(self, batch: list[_Row]) -> None:
        waiting = [row for row in batch if isinstance(row.content, Conversation)]
        if not waiting:
            return
        self._masker.require_template()
        encoded: list[Tokens | RowError]
        try:
            encoded = self._masker.encode([row.content for row in waiting])
        except Exception as e:  # noqa: BLE001  (a tokenizer's own code raises anything: find the row that it is about)
            if len(waiting) > 1:
                for row in waiting:
                    self._tokenize([row])
                return
            encoded = [RowError(ErrorCode.BAD_ROW, f"the tokenizer fails on it: {type(e).__name__}: {e}")]
        for row, content in zip(waiting, encoded, strict=True):
            row.content = content

    def _judge(self, row: _Row) -> Tokens | RowError:
        """The last word on a tokenised row: its length, and what truncation leaves of its mask."""
        content, limit = row.content, self.spec.max_length
        assert not isinstance(content, Conversation)
        if isinstance(content, RowError) or not limit or len(content.input_ids) <= limit:
            return content
        if not self.spec.truncate:
            return RowError(ErrorCode.PROMPT_TOO_LONG, f"{len(content.input_ids)} tokens, max_length is {limit}")
        mask = content.loss_mask[:limit]
        if not mask.any():
            return RowError(ErrorCode.NO_SUPERVISED_TOKEN, f"no supervised token among the first {limit} that truncation keeps")
        return Tokens(input_ids=content.input_ids[:limit], loss_mask=mask)

    # -- a record batch

    def _record_batch(self, batch: list[_Row]) -> pa.RecordBatch:
        ids, masks, codes, messages, offsets = [], [], [], [], [0]
        for row in batch:
            result = self._judge(row)
            if isinstance(result, RowError):
                num_tokens = 0
                codes.append(result.code.value)
                messages.append(f"{self.unit} {row.line}: {result.message}")
                self._reject(row, result, messages[-1])
            else:
                num_tokens = len(result.input_ids)
                ids.append(result.input_ids)
                masks.append(result.loss_mask)
                codes.append("")
                messages.append("")
                self._accept(num_tokens, int(np.count_nonzero(result.loss_mask)))
            self._hash.update(struct.pack("<q", num_tokens))
            if num_tokens:
                self._hash.update(ids[-1].data)
                self._hash.update(masks[-1].data)
            offsets.append(offsets[-1] + num_tokens)
        at = pa.array(offsets, pa.int32())
        return pa.RecordBatch.from_arrays(
            [
                pa.ListArray.from_arrays(at, pa.array(np.concatenate([np.empty(0, np.int32), *ids]))),
                pa.ListArray.from_arrays(at, pa.array(np.concatenate([np.empty(0, np.uint8), *masks]))),
                pa.array([row.source_id for row in batch], pa.string()),
                pa.array([row.line for row in batch], pa.int64()),
                pa.array(codes, pa.string()),
                pa.array(messages, pa.string()),
            ],
            schema=SCHEMA,
        )

    def _accept(self, num_tokens: int, supervised: int) -> None:
        self.rows += 1
        self.accepted += 1
        self.tokens += num_tokens
        self.supervised += supervised
        self.longest = max(self.longest, num_tokens)

    def _reject(self, row: _Row, error: RowError, message: str) -> None:
        self.errors[error.code.value] = self.errors.get(error.code.value, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append({"row": self.rows, "line": row.line, "code": error.code.value, "message": message})
        self.rows += 1

    # -- status

    def _progress(self, source: Source) -> None:
        if self.stop():
            raise StoppedError("asked to stop")
        self.bytes_read, self.bytes_total = source.bytes_read, source.bytes_total
        if (now := time.monotonic()) >= self._next_progress:
            self._next_progress = now + PROGRESS_EVERY_S
            self.on_progress(self.status(DatasetState.INGESTING))

    def status(self, state: DatasetState, error: StatetapError | None = None) -> DatasetStatus:
        return DatasetStatus(
            dataset_id=self.spec.dataset_id,
            state=state.value,
            rows=self.rows,
            accepted=self.accepted,
            rejected=self.rows - self.accepted,
            tokens=self.tokens,
            supervised_tokens=self.supervised,
            max_tokens=self.longest,
            bytes_read=self.bytes_read,
            bytes_total=self.bytes_total,
            errors=dict(self.errors),
            examples=list(self.examples),
            content_hash=self._hash.hexdigest() if state is DatasetState.READY else "",
            error={"code": error.code.value, "message": error.message} if error else None,
            updated_at=time.time(),
        )
