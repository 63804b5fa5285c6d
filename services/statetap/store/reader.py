"""A finished job as a torch Dataset: maps one sample file an item and derives what the trainer asks for.

Invariant: only rows that the manifest calls done, and whose files were not freed, are served, in the order of the source; a job is not
deleted while it is open here; post-norm states are derived from pre-norm ones, never the other way round. The index is three Arrow
columns, whatever the number of rows. Of the store only this module, stream.py and export/ import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from torch.utils.data import Dataset

from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.layout import COMPLETE, MANIFEST, NORM
from ..contracts.profile import CaptureProfile, NormSpec
from ..contracts.records import RowState
from ..contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS, LOSS_MASK, POSITIONS
from .acks import Acks, load_acks
from .complete import load_completion
from .delete import Reading
from .jobs import load_job
from .ledger import JobLedger
from .opened import Tensors, open_sample
from .samples import Reads, samples_of

_INDEX = pa.schema([("row", pa.int64()), ("tokens", pa.int64()), ("path", pa.string())])


def apply_final_norm(pre: torch.Tensor, weight: torch.Tensor, norm: NormSpec) -> torch.Tensor:
    """post from pre, [T, H] -> [T, H] in the dtype of ``pre``.

    fp32 throughout and rounded once, as SGLang's RMSNorm kernels do (HF's Llama rounds before it multiplies: at most one ulp away).
    """
    x = pre.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    w = weight.float()
    return (x * (1.0 + w if norm.variant == "gemma_rmsnorm" else w)).to(pre.dtype)


class SampleLoader:
    """Reads sample files of one job as items (see :class:`JobDataset`). Raises RequestError."""

    def __init__(self, job_dir: Path, *, boundaries: Sequence[int] | None, final: Literal["post", "pre"] | None) -> None:
        self.job_dir = job_dir
        spec = load_job(job_dir)
        self._samples = samples_of(job_dir, spec)
        self._format = spec.sample_format
        self.profile = self._format.kept
        self.boundaries = tuple(self.profile.boundaries if boundaries is None else boundaries)
        self._final = final
        self._columns = _columns(self.profile, self.boundaries)
        self._derive = _must_derive(self.profile, final)
        self._weight: torch.Tensor | None = None

    def load(self, name: str, held: Reads | None = None) -> dict[str, torch.Tensor]:
        """One file, by its path below the job's folder; ``held``: where it was read already. Raises StoreError as :func:`open_sample`."""
        with open_sample(held or self._samples, name, self._format) as f:
            item = {
                INPUT_IDS: f.get_tensor(INPUT_IDS).long(),
                LOSS_MASK: f.get_tensor(LOSS_MASK).long(),
                AUX: self._aux(f.get_tensor(AUX)),
            }
            if self._format.thinned:
                item[POSITIONS] = f.get_tensor(POSITIONS).long()
            if self._final:
                item[FINAL_POST] = self._final_state(f)
        return item

    def _aux(self, aux: torch.Tensor) -> torch.Tensor:
        if self._columns is None:
            return aux
        T, H = aux.shape[0], self.profile.hidden
        return aux.view(T, -1, H)[:, self._columns].reshape(T, -1)

    def _final_state(self, f: Tensors) -> torch.Tensor:
        if not self._derive:
            return f.get_tensor(FINAL_PRE if self._final == "pre" else FINAL_POST)
        if self._weight is None:
            self._weight, self._norm = load_norm(self.job_dir / NORM)
        return apply_final_norm(f.get_tensor(FINAL_PRE), self._weight, self._norm)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight": None}  # read again in each DataLoader worker


class JobDataset(Dataset[dict[str, torch.Tensor]]):
    """The done rows of a job. Item i is a dict of CPU tensors, with T tokens, K boundaries and hidden size H:

    ``input_ids`` [T] int64, ``loss_mask`` [T] int64, ``aux_hidden_states`` [T, K*H] and, unless ``final`` is None,
    ``final_hidden_states`` [T, H], both in the model's dtype, whatever the files' encoding. Raw states are mapped from the file and not copied where they are taken as they
    lie there; writing into them does not change the file. Rows are unshifted. A job that keeps the states of some positions only has
    ``positions`` [n] int64, ascending, and n rows of states in place of T.

    Args:
        boundaries: those to take, in this order (default: all that were kept).
        final: "post" (after the final norm), "pre" (the last residual stream) or None.
        require_complete: refuse a job without its COMPLETE marker. False serves what is done by now, frozen at this moment.

    Raises:
        StoreError: ``incomplete`` (what is missing is named), ``store_io`` for files that cannot be read.
        RequestError: ``not_found`` for no job; ``invalid_request`` for boundaries or a final state that were not captured.
    """

    def __init__(
        self,
        job_dir: str | Path,
        *,
        boundaries: Sequence[int] | None = None,
        final: Literal["post", "pre"] | None = "post",
        require_complete: bool = True,
    ) -> None:
        self._loader = SampleLoader(Path(job_dir), boundaries=boundaries, final=final)
        self.job_dir, self.profile, self.boundaries = self._loader.job_dir, self._loader.profile, self._loader.boundaries
        self._reading = Reading(self.job_dir)
        complete = load_completion(self.job_dir) is not None
        if require_complete and not complete:
            raise StoreError(ErrorCode.INCOMPLETE, what_is_missing(self.job_dir))
        index = _index_of_manifest(self.job_dir) if complete else _index_of_ledger(self.job_dir)
        index = _without_freed(index, load_acks(self.job_dir))
        self._rows, self._tokens, self._paths = (index.column(name).combine_chunks() for name in _INDEX.names)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> int:
        """The source row of item i."""
        return self._rows[i].as_py()

    def num_tokens(self, i: int) -> int:
        """T of item i, without opening its file: for length-grouped batches."""
        return self._tokens[i].as_py()

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        """Raises IndexError, StoreError ``file_missing`` or ``file_corrupt``."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of {len(self)}")
        return self._loader.load(self._paths[i % len(self)].as_py())


def _without_freed(index: pa.Table, acks: Acks) -> pa.Table:
    """The rows whose files are still there."""
    for start, stop in acks.ranges:
        row = index.column("row")
        index = index.filter(pc.or_(pc.less(row, start), pc.greater_equal(row, stop)))
    return index


def _columns(profile: CaptureProfile, boundaries: tuple[int, ...]) -> list[int] | None:
    """Positions of the boundaries among the captured ones, None for all as they lie."""
    missing = [b for b in boundaries if b not in profile.boundaries]
    if missing or not boundaries:
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"boundaries: {missing or 'none'} asked for, {list(profile.boundaries)} were captured"
        )
    return None if boundaries == profile.boundaries else [profile.boundaries.index(b) for b in boundaries]


def _must_derive(profile: CaptureProfile, final: str | None) -> bool:
    """Whether the final state asked for comes from the pre-norm one through the norm."""
    held = {"pre": ("pre",), "post": ("post",), "both": ("pre", "post"), "none": ()}[profile.final]
    if final is None or final in held:
        return False
    if final == "post" and "pre" in held:
        return True
    raise RequestError(
        ErrorCode.INVALID_REQUEST, f"final: {final!r} cannot be had from a job that captured {profile.final!r} (post cannot be turned back)"
    )


def load_norm(path: Path) -> tuple[torch.Tensor, NormSpec]:
    """(weight [H], how it is applied). Raises StoreError ``file_missing``, ``file_corrupt``."""
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            return f.get_tensor("weight").clone(), NormSpec(variant=metadata["variant"], eps=float(metadata["eps"]))
    except FileNotFoundError as e:
        raise StoreError(ErrorCode.FILE_MISSING, f"{path}: the final norm, which post is derived with, is not there") from e
    except (SafetensorError, OSError, KeyError, ValueError) as e:
        raise StoreError(ErrorCode.FILE_CORRUPT, f"{path}: {e!r}") from e


def _index_of_manifest(job_dir: Path) -> pa.Table:
    try:
        table = pq.read_table(job_dir / MANIFEST, columns=[*_INDEX.names, "state"])
    except (OSError, pa.ArrowInvalid) as e:
        raise StoreError(ErrorCode.STORE_IO, f"{job_dir / MANIFEST}: {e}") from e
    done = table.filter(pc.equal(table.column("state"), RowState.DONE.value)).select(_INDEX.names)
    return done.cast(_INDEX)


def _index_of_ledger(job_dir: Path) -> pa.Table:
    """What is done by now. One Arrow batch for each batch of the job, so Python objects are those of one batch."""

    ledger = JobLedger(job_dir)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in ledger.batches():
            done = sorted((r for r in ledger.records(batch).values() if r.state == RowState.DONE), key=lambda r: r.row)
            yield pa.RecordBatch.from_pydict({name: [getattr(r, name) for r in done] for name in _INDEX.names}, schema=_INDEX)

    return pa.Table.from_batches(batches(), schema=_INDEX)


def what_is_missing(job_dir: Path) -> str:
    """A sentence on why a job is not complete."""
    rows = load_job(job_dir).rows
    count = {state.value: 0 for state in RowState}
    ledger = JobLedger(job_dir)
    for batch in ledger.batches():
        for record in ledger.records(batch).values():
            count[record.state] += 1
    known = sum(count.values())
    states = ", ".join(f"{n} {state}" for state, n in count.items())
    missing = f"{rows - known} open" if known < rows else f"all rows ended, but the {COMPLETE} marker is not written"
    return f"job {job_dir.name} is not complete: of {rows} rows {states}; {missing}"
