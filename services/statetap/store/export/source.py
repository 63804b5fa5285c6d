"""What is exported: the done rows of a complete job, streamed from its manifest, each file checked against its hash before it is used.

Invariant: memory is that of one piece of the manifest and of the rows in hand, whatever the number of rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import xxhash

from ...contracts.errors import ErrorCode, RequestError, StatetapError, StoreError
from ...contracts.layout import MANIFEST, NORM
from ...contracts.records import RowState
from ..acks import load_acks
from ..complete import load_completion
from ..decode import SampleFile
from ..fs import store_error
from ..jobs import load_job
from ..reader import SampleLoader, load_norm, what_is_missing
from ..samples import fetched, samples_of
from .base import Final, Format, Item, Tokens

_COLUMNS = ["row", "source_id", "state", "tokens", "bytes", "path", "xxh3"]
_ROWS_AT_ONCE = 4096
_READ = 8 << 20


class Source:
    """The rows of a job as a format wants them.

    Args:
        boundaries: those to take, in this order; None for all that were kept.
        final: the final state; None for the one that the format's trainers expect.
        rows: half-open range of the source's rows; None for all.

    Raises:
        RequestError: ``not_found`` for no job; ``invalid_request`` for what this job, or this format, does not have.
        StoreError: ``incomplete``; ``file_missing`` or ``file_corrupt`` for the norm, ``store_io`` for the manifest.
    """

    def __init__(
        self, job_dir: Path, format: Format, *, boundaries: tuple[int, ...] | None, final: Final | None, rows: tuple[int, int] | None
    ) -> None:
        self.job_dir = job_dir
        self.spec = load_job(job_dir)
        self.format = self.spec.sample_format
        self._samples = samples_of(job_dir, self.spec)
        self.profile = self.format.kept
        if self.format.thinned:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"positions: the job keeps the states of {self.format.positions} alone, and {format.title} files hold those of every token",
                next_step="Extract again with positions=all, or read the job with JobDataset.",
            )
        completion = load_completion(job_dir)
        if completion is None:
            raise StoreError(ErrorCode.INCOMPLETE, what_is_missing(job_dir), next_step="Let the job end before you export it.")
        self.completion = completion
        self.acks = load_acks(job_dir)
        start, stop = rows or (0, self.spec.rows)
        self.rows = start, min(stop, self.spec.rows)
        self.final, self.derived = _final(format, final, self.profile.final)
        if boundaries is not None and not format.has_aux:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"boundaries: {format.title} files hold no states of boundaries")
        if self.derived:
            load_norm(job_dir / NORM)  # now, not at the first row
        self._local = threading.local()
        self._asked = boundaries
        self.boundaries = self._loader().boundaries if format.has_aux else ()

    def _loader(self) -> SampleLoader:
        """This thread's."""
        loader: SampleLoader | None = getattr(self._local, "loader", None)
        if loader is None:
            loader = SampleLoader(self.job_dir, boundaries=self._asked, final=self.final)
            self._local.loader = loader
        return loader

    def items(self) -> Iterator[Item]:
        """In the order of the source. Raises StoreError ``store_io``."""
        index = 0
        for batch in self._batches():
            for values in batch.to_pylist():
                del values["state"]
                yield Item(index=index, **values)
                index += 1

    def totals(self) -> tuple[int, int]:
        """(rows, tokens) of all items."""
        rows = tokens = 0
        for batch in self._batches():
            rows += batch.num_rows
            tokens += pc.sum(batch.column("tokens")).as_py() or 0
        return rows, tokens

    def _batches(self) -> Iterator[pa.RecordBatch]:
        path = self.job_dir / MANIFEST
        try:
            with pq.ParquetFile(path, pre_buffer=False) as manifest:
                for batch in manifest.iter_batches(batch_size=_ROWS_AT_ONCE, columns=_COLUMNS):
                    row = batch.column("row")
                    keep = pc.and_(pc.greater_equal(row, self.rows[0]), pc.less(row, self.rows[1]))
                    keep = pc.and_(keep, pc.equal(batch.column("state"), RowState.DONE.value))
                    for start, stop in self.acks.ranges:
                        keep = pc.and_(keep, pc.or_(pc.less(row, start), pc.greater_equal(row, stop)))
                    yield batch.filter(keep)
        except (OSError, pa.ArrowInvalid) as e:
            raise StoreError(ErrorCode.STORE_IO, f"{path}: {e}") from e

    def sample(self, item: Item) -> dict[str, torch.Tensor]:
        """The row's tensors, as SampleLoader gives them. Raises StoreError ``file_missing``, ``file_corrupt``, ``store_io``."""
        digest, size = xxhash.xxh3_64(), 0
        try:
            held = fetched(self._samples, item.path)
            with held.open(item.path) as f:
                while block := f.read(_READ):
                    digest.update(block)
                    size += len(block)
        except FileNotFoundError:
            raise StoreError(ErrorCode.FILE_MISSING, f"{item.path} is not there") from None
        except OSError as e:
            raise store_error(e, f"read {item.path}") from e
        if size != item.bytes or digest.hexdigest() != item.xxh3:
            raise StoreError(ErrorCode.FILE_CORRUPT, f"{item.path}: {size} bytes, xxh3 {digest.hexdigest()}, not {item.bytes}, {item.xxh3}")
        return self._loader().load(item.path, held)

    def tokens(self) -> Iterator[Tokens]:
        """All items with their ids and masks; the states are not read. Raises StoreError as :meth:`sample` does."""
        for item in self.items():
            try:
                with SampleFile(self._samples, item.path, self.format) as f:
                    ids, mask, _ = f.row(f.head()[1])
            except FileNotFoundError:
                raise StoreError(ErrorCode.FILE_MISSING, f"{item.path} is not there") from None
            except OSError as e:
                raise store_error(e, f"read {item.path}") from e
            except StatetapError as e:
                raise StoreError(ErrorCode.FILE_CORRUPT, f"{item.path}: {e.message}") from e
            yield item, ids.astype(np.int64), mask.astype(np.int64)


def _final(format: Format, asked: Final | None, captured: str) -> tuple[Final, bool]:
    """(the final state to write, whether it is derived from the pre-norm one)."""
    final = asked or format.finals[0]
    if final not in format.finals:
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"final: {format.title} files hold the {format.finals[0]}-norm state and cannot say that it is another",
        )
    held = {"pre": ("pre",), "post": ("post",), "both": ("pre", "post"), "none": ()}[captured]
    if final in held:
        return final, False
    if final == "post" and "pre" in held:
        return final, True
    why = "a post-norm state cannot be turned back" if held else "it has no final state"
    raise RequestError(
        ErrorCode.INVALID_REQUEST,
        f"final: {format.title} needs the {final}-norm state, and the job captured {captured!r}: {why}",
        next_step="Extract again from an engine with --final pre.",
    )
