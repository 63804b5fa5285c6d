"""A finished job on disk, made by the project's own writers: tap files, staging, the grouped commit, the norm, manifest and COMPLETE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from statetap.contracts.capture import new_lease
from statetap.contracts.errors import ErrorCode
from statetap.contracts.layout import DATASETS, NORM, ROWS
from statetap.contracts.records import RowRecord
from statetap.contracts.sample_format import SampleFormat
from statetap.store.commit import Committer
from statetap.store.complete import finish_job
from statetap.store.rows import RowsFile
from statetap.store.sample import SampleWriter
from tests.support.jobs import Mask, StateMaker, every_second, make_job, profile, write_rows

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class FinishedJob:
    """``bad``: rows that were skipped. The norm's weight is not all ones, so that post differs from pre by more than a scale."""

    def __init__(
        self,
        folder: Path,
        lengths: Sequence[int] = (5, 9, 3, 7, 1),
        *,
        bad: Sequence[int] = (1,),
        vocab: int = 50,
        keep: Sequence[int] = (),
        encoding: str = "raw",
        positions: str = "all",
        mask: Mask = every_second,
        **of: Any,
    ) -> None:
        self.profile = profile(vocab=vocab, **{"hidden": 8, "layers": 32, "boundaries": (2, 16, 29), **of})
        random = np.random.default_rng(5)
        rows = [random.integers(0, vocab, n).tolist() for n in lengths]
        errors = dict.fromkeys(bad, ErrorCode.EMPTY_PROMPT.value)
        write_rows(folder / DATASETS / "ds-test" / ROWS, rows, errors, mask)
        self.path, rows_path, batches = make_job(
            folder, self.profile, rows, errors=errors, boundaries=keep, encoding=encoding, positions=positions
        )
        self.rows_path, self.batches = rows_path, batches
        self.format = SampleFormat(self.profile, tuple(keep), encoding, positions)
        self.weight = torch.rand(self.profile.hidden, generator=torch.Generator().manual_seed(3)).add(0.5).to(DTYPES[self.profile.dtype])
        if self.profile.final != "none":
            save_file({"weight": self.weight}, self.path / NORM, metadata={"variant": "rmsnorm", "eps": repr(self.profile.norm.eps)})
        tap = folder / "tap"
        tap.mkdir()
        self.rows = [n for n in range(len(lengths)) if n not in bad]
        source, maker, lease = RowsFile(rows_path), StateMaker(self.profile), new_lease()
        for batch in batches:
            committer = Committer(self.path, self.format, batch.batch, lease, lambda _: None)
            writer = SampleWriter(self.path, self.format, lease)
            for row in source.read(batch.start, batch.stop):
                if row.error_code:
                    committer.submit(RowRecord(row=row.row, state="skipped", code=row.error_code, message=row.error_message))
                    continue
                file = tap / f"{row.row}.safetensors"
                file.write_bytes(maker.tap_file(row.input_ids))
                committer.submit(writer.stage(row, 0, file))
            committer.close()
        source.close()
        tap.rmdir()
        self.completion = finish_job(self.path, rows_path)

    def file(self, row: int) -> Path:
        (path,) = self.path.glob(f"rows_*/data_{row}.safetensors*")
        return path

    def tensors(self, row: int) -> dict[str, torch.Tensor]:
        """The native file's."""
        return load_file(self.file(row))

    def post(self, row: int) -> torch.Tensor:
        """The final norm applied in fp64 by the book, [T, H] fp64: to compare a derived state with."""
        tensors = self.tensors(row)
        if "final_hidden_states" in tensors:
            return tensors["final_hidden_states"].double()
        x = tensors["final_hidden_states_prenorm"].double()
        return x / (x.pow(2).mean(-1, keepdim=True) + self.profile.norm.eps).sqrt() * self.weight.double()


def within_an_ulp(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether ``got`` is the rounding of ``want`` [fp64] to its dtype, or a neighbour of it."""
    rounded = want.to(got.dtype)
    if got.shape != rounded.shape:
        return False
    steps = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return bool(((got.view(steps).long() - rounded.view(steps).long()).abs() <= 1).all())


def marker(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "EXPORT.json").read_text())
    return found
