"""One dataset: source file -> rows.arrow and report.json.

Invariant: row r of rows.arrow is row r of the source (of the sources one after the other; of that order permuted, where there is a
seed), good or bad; rows.arrow appears whole, and report.json after it, so a dataset with a report is finished and one without is begun
again from nothing, with the same result. Memory is that of one record batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator
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
from ..store.keyindex import build_index
from ..store.rows import SCHEMA
from .formats import MAX_ROW_BYTES, Source
from .kinds import KINDS, TOKENIZED, Conversation, Tokens, detect, parse, source_id
from .permutation import Permutation
from .shuffle import shuffled

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 100
PROGRESS_EVERY_S = 0.5
_GROUP_CHARS = 2 << 20  # of conversations tokenised in one call: bounds the offsets held at once


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of a row: bytes as it is written in the source, and tokens."""

    row_bytes: int = MAX_ROW_BYTES
    row_tokens: int = 1 << 24


class StoppedError(Exception):
    """The process was asked to end, or another one is at this dataset."""


@dataclass(kw_only=True)
class _Row:
    """A source row on its way; ``content`` ends as Tokens or RowError."""

    source: int
    line: int
    source_id: str
    content: Tokens | Conversation | RowError


def ingest(
    spec: DatasetSpec,
    store: Path,
    on_progress: Callable[[DatasetStatus], None],
    stop: Callable[[], bool] = lambda: False,
    limits: Limits = Limits(),
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
    run = _Run(spec, folder, on_progress, stop, limits)
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
    limits: Limits
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
        self._no_masker = "a tokenizer has to be named"

    # -- the whole file

    def write(self) -> None:
        """Write rows.arrow. Raises RequestError, StoreError, OSError or StoppedError; then nothing is left behind."""
        if self.kind and self.kind not in KINDS:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"format: {self.kind!r} is none of auto, {', '.join(KINDS)}")
        self.bytes_total = sum(map(_size, self.spec.files))
        if self.spec.tokenizer:
            try:
                self._load_tokenizer()
            except RequestError as e:
                if self.kind not in ("", TOKENIZED):
                    raise
                # Tokenised rows are only looked at earlier with it: the worker knows the model's vocabulary.
                self._no_masker = e.message
                logger.warning("dataset %s: ids of tokenised rows are not held against the vocabulary: %s", self.spec.dataset_id, e.message)
        seed = self.spec.shuffle_seed
        with contextlib.ExitStack() as cleanup:
            tmp = self._temp(cleanup)
            self._write(tmp, map(self._record_batch, self._batches()), hashed=seed is None)
            if self.accepted == 0:
                raise self._no_good_row()
            if seed is not None:
                ordered, tmp = tmp, self._temp(cleanup)
                permutation = Permutation(self.rows, seed)
                self._write(tmp, shuffled(ordered, permutation), hashed=True)
                for example in self.examples:
                    example["row"] = int(permutation.backward(example["row"]))
                self.examples.sort(key=lambda e: e["row"])
            if self.stop():
                raise StoppedError("asked to stop")
            try:
                os.replace(tmp, self.folder / ROWS)
            except FileNotFoundError:
                raise StoppedError(f"another process is at dataset {self.spec.dataset_id}") from None
            fsync_dir(self.folder)
            build_index(self.folder / ROWS)

    def _temp(self, cleanup: contextlib.ExitStack) -> Path:
        path = Path(temp(str(self.folder / ROWS), secrets.token_hex(8)))
        cleanup.callback(remove, path)
        return path

    def _write(self, path: Path, batches: Iterable[pa.RecordBatch], *, hashed: bool) -> None:
        with open(path, "xb") as file:
            with pa.ipc.new_file(file, SCHEMA) as writer:
                for batch in batches:
                    if hashed:
                        _update(self._hash, batch)
                    writer.write_batch(batch)
                    self._progress()
            file.flush()
            os.fsync(file.fileno())

    def _no_good_row(self) -> RequestError:
        if self.rows == 0:
            return RequestError(ErrorCode.DATASET_FAILED, f"{' and '.join(self.spec.files[:3])} has no rows")
        counts = ", ".join(f"{code} {n}" for code, n in sorted(self.errors.items()))
        code = ErrorCode(max(self.errors, key=lambda c: self.errors[c]))
        return RequestError(code, f"none of the {self.rows} rows is good ({counts}); the first: {self.examples[0]['message']}")

    def _batches(self) -> Iterator[list[_Row]]:
        """The rows in groups of exactly ROWS_PER_RECORD_BATCH (the last may be shorter), tokenised."""
        batch: list[_Row] = []
        waiting, chars = 0, 0  # conversations at the end of ``batch`` that are not tokenised yet
        for row in self._read():
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

    def _read(self) -> Iterator[_Row]:
        """The rows of all sources, one source after the other; each has its own kind where the format is ``auto``."""
        before = 0
        for number, path in enumerate(self.spec.files):
            self.kind = "" if self.spec.format == "auto" else self.spec.format
            with Source(Path(path), max_row_bytes=self.limits.row_bytes) as source:
                for line, value in source:
                    self.unit, self.bytes_read = source.unit, before + source.bytes_read
                    yield self._parse(number, line, value)
                self.bytes_read = before = before + source.bytes_total

    # -- one row

    def _parse(self, number: int, line: int, value: dict[str, Any] | RowError) -> _Row:
        self.place = self.spec.place(number, line, self.unit)
        own_id = self.place if self.spec.sources else str(line)
        if isinstance(value, RowError):
            return _Row(source=number, line=line, source_id=own_id, content=value)
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
            raise RequestError(ErrorCode.DATASET_FAILED, f"{self.place} is a conversation: {self._no_masker}")
        return _Row(source=number, line=line, source_id=source_id(value, own_id), content=content)

    def _load_tokenizer(self) -> None:
        from .mask import Masker  # imports transformers, which tokenised rows do not need

        if not os.path.isabs(self.spec.tokenizer) and os.path.exists(self.spec.tokenizer):
            # A hub id; transformers would take the folder of that name below wherever this process happens to stand.
            message = f"tokenizer {self.spec.tokenizer!r} is also a folder here: give its absolute path, or start ingestion elsewhere"
            raise RequestError(ErrorCode.DATASET_FAILED, message)
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
        if isinstance(content, RowError):
            return content
        if limit and len(content.input_ids) > limit:
            if not self.spec.truncate:
                return RowError(ErrorCode.PROMPT_TOO_LONG, f"{len(content.input_ids)} tokens, max_length is {limit}")
            mask = content.loss_mask[:limit]
            if not mask.any():
                return RowError(ErrorCode.NO_SUPERVISED_TOKEN, f"no supervised token among the first {limit} that truncation keeps")
            content = Tokens(input_ids=content.input_ids[:limit], loss_mask=mask)
        if len(content.input_ids) > self.limits.row_tokens:
            message = f"{len(content.input_ids)} tokens, at most {self.limits.row_tokens} are kept (STATETAP_MAX_ROW_TOKENS)"
            return RowError(ErrorCode.PROMPT_TOO_LONG, message)
        return content

    # -- a record batch

    def _record_batch(self, batch: list[_Row]) -> pa.RecordBatch:
        ids, masks, codes, messages, offsets = [], [], [], [], [0]
        for row in batch:
            result = self._judge(row)
            if isinstance(result, RowError):
                num_tokens = 0
                codes.append(result.code.value)
                messages.append(f"{self.spec.place(row.source, row.line, self.unit)}: {result.message}")
                self._reject(row, result, messages[-1])
            else:
                num_tokens = len(result.input_ids)
                ids.append(result.input_ids)
                masks.append(result.loss_mask)
                codes.append("")
                messages.append("")
                self._accept(num_tokens, int(np.count_nonzero(result.loss_mask)))
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
                pa.array([row.source for row in batch], pa.int32()),
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

    def _progress(self) -> None:
        if self.stop():
            raise StoppedError("asked to stop")
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


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as e:
        raise RequestError(ErrorCode.DATASET_FAILED, f"cannot open {path}: {e.strerror or e}") from e


def _update(digest: xxhash.xxh3_128, batch: pa.RecordBatch) -> None:
    """Token counts, ids and masks of the rows, in order."""
    ids, masks = batch.column(0), batch.column(1)
    at, mask_at = ids.offsets.to_numpy(), masks.offsets.to_numpy()
    all_ids, all_masks = ids.values.to_numpy(), masks.values.to_numpy()
    for i in range(len(batch)):
        digest.update(struct.pack("<q", int(at[i + 1] - at[i])))
        digest.update(all_ids[at[i] : at[i + 1]].data)
        digest.update(all_masks[mask_at[i] : mask_at[i + 1]].data)
