"""Jobs that keep the states of some positions only: which those are, and what comes of it in files, readers, checks and exports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from statetap.cli.compare import compare_job_head
from statetap.contracts.capture import new_lease
from statetap.contracts.errors import ErrorCode, RequestError, RowError
from statetap.contracts.positions import Positions
from statetap.contracts.sample_format import Encoding, SampleFormat
from statetap.contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS, LOSS_MASK, POSITIONS, tap_header
from statetap.engine.parity import Reference, compare_files
from statetap.store.export.registry import FORMATS
from statetap.store.export.run import export_job
from statetap.store.positions import count_kept, kept_positions
from statetap.store.reader import JobDataset
from statetap.store.resume import resume_batch
from statetap.store.reuse import reuse_rows
from statetap.store.rows import Row, RowsFile
from statetap.store.sample import SampleWriter, check_sample
from statetap.store.samples import FolderSamples
from statetap.store.verify import verify_job
from tests.support.finished import FinishedJob
from tests.support.jobs import StateMaker, profile, write_rows
from tests.support.models import make_model

ENCODINGS = [e.value for e in Encoding]
LENGTHS = (5, 9, 700, 7, 1)


def middle(n: int) -> list[int]:
    """A mask with gaps: the first third is 0, the last token too, and every fifth."""
    return [int(i >= n // 3 and (i < n - 1 or n < 3) and i % 5 > 0) if n > 1 else 1 for i in range(n)]


def by_the_book(positions: str, mask: Sequence[int]) -> list[int]:
    T = len(mask)
    if positions == "all":
        return list(range(T))
    if positions == "loss_mask":
        return [t for t in range(T) if mask[t] or (t > 0 and mask[t - 1])]
    return list(range(T))[-int(positions.removeprefix("last:")) :]


MASKS = st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=8)
WHERE = st.sampled_from(["all", "loss_mask", "last:1", "last:4"])


@given(MASKS, WHERE)
def test_positions_are_those_of_the_book_in_one_row_and_counted_over_many(masks: list[list[int]], positions: str) -> None:
    where = Positions.parse(positions)
    for mask in masks:
        found = kept_positions(where, np.array(mask, np.uint8))
        assert (list(range(len(mask))) if found is None else found.tolist()) == by_the_book(positions, mask)
        assert where.most(1, len(mask)) >= len(by_the_book(positions, mask))
    offsets = np.cumsum([0, *map(len, masks)])
    counts = count_kept(where, np.array([m for mask in masks for m in mask], np.uint8), offsets)
    assert counts.tolist() == [len(by_the_book(positions, m)) for m in masks]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=150), st.sets(st.integers(0, 149)), WHERE)
def test_a_rows_file_counts_them_whatever_the_bad_rows(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], bad: set[int], positions: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.arrow"
    write_rows(path, [list(range(n)) for n in lengths], dict.fromkeys(bad, "bad_row"), middle)
    file = RowsFile(path)
    tokens, kept = (np.concatenate(x).tolist() for x in zip(*file.counts(Positions.parse(positions)), strict=True))
    good = [0 if i in bad else n for i, n in enumerate(lengths)]
    assert tokens == good and kept == [len(by_the_book(positions, middle(n))) for n in good]
    file.close()


@pytest.mark.parametrize("text", ["", "last", "last:0", "last:-1", "last:x", "ALL", "loss_mask:3", "last:4\n"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="last:N"):
        Positions.parse(text)


@pytest.mark.parametrize("positions", ["loss_mask", "last:1", "last:600"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_job_holds_the_states_of_its_positions_and_all_else_whole(tmp_path: Path, encoding: str, positions: str) -> None:
    """Rows of several blocks and of one token; boundaries in another order; the norm is applied to what is there."""
    whole = FinishedJob(tmp_path / "whole", LENGTHS, hidden=512, mask=middle, keep=(29, 2), encoding=encoding)
    job = FinishedJob(tmp_path / "job", LENGTHS, hidden=512, mask=middle, keep=(29, 2), encoding=encoding, positions=positions)
    report = verify_job(job.path, job.rows_path)
    assert report.ok and report.files == 4 and verify_job(job.path).ok
    accepted = [LENGTHS[r] for r in job.rows]
    kept = [len(by_the_book(positions, middle(n))) for n in accepted]
    exact = job.format.bytes(sum(accepted), sum(kept), 4)
    assert report.bytes == exact if job.format.exact else report.bytes <= exact
    assert exact <= job.format.most(sum(accepted), 4)
    want, got = JobDataset(whole.path), JobDataset(job.path)
    for a, b, n in zip(want, got, accepted, strict=True):
        at = by_the_book(positions, middle(n))
        assert b[POSITIONS].tolist() == at and POSITIONS not in a
        assert torch.equal(a[INPUT_IDS], b[INPUT_IDS]) and b[LOSS_MASK].tolist() == middle(n)
        for name in (AUX, FINAL_POST):
            assert b[name].shape[0] == len(at) and torch.equal(b[name], a[name][at]), name
    source = RowsFile(job.rows_path)
    for row in source.read(2, 3):
        assert check_sample(FolderSamples(job.path), job.format, row, 0).xxh3
    source.close()
    if encoding == "raw":
        tensors = load_file(job.file(2))
        assert tensors[POSITIONS].dtype == torch.int32 and tensors[FINAL_PRE].shape == (kept[1], 512)


def test_a_file_with_other_positions_than_its_row_has_is_found(tmp_path: Path) -> None:
    """By the check before a file is adopted, when its hash is in no ledger."""
    job = FinishedJob(tmp_path, (9, 40), bad=(), hidden=64, mask=middle, positions="loss_mask")
    data = bytearray(job.file(1).read_bytes())
    header = job.format.header(40, len(by_the_book("loss_mask", middle(40))), row=1, source_id="", ids_xxh3="", schema_version=1)
    at = header.tensors[POSITIONS].start
    assert data[at : at + 4] == np.int32(by_the_book("loss_mask", middle(40))[0]).tobytes()
    data[at : at + 4] = np.int32(0).tobytes()
    job.file(1).write_bytes(data)
    source = RowsFile(job.rows_path)
    (row,) = source.read(1, 2)
    with pytest.raises(RowError, match="other positions") as e:
        check_sample(FolderSamples(job.path), job.format, row, 0)
    assert e.value.code == ErrorCode.FILE_CORRUPT
    for segment in (job.path / "ledger").iterdir():
        segment.unlink()
    resumed = resume_batch(job.path, job.format, job.batches[0], source, new_lease())
    source.close()
    assert resumed.adopted == 1 and list(resumed.open_rows) == [1]


def test_padding_alone_may_be_what_is_kept(tmp_path: Path) -> None:
    """A zero embedding at the last position is no error of the row; a whole plane of zeros is one, before it is thinned."""
    p = profile(hidden=16, boundaries=(0, 4), final="none", dtype="F32")
    format = SampleFormat(p, (), "raw", "last:1")
    states = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    states[5, 0] = 0
    ids = np.arange(6, dtype=np.int32)
    row = Row(
        row=0,
        input_ids=ids,
        loss_mask=np.ones(6, np.uint8),
        source_id="a",
        line=1,
        error_code="",
        error_message="",
        source=0,
    )
    tap = tmp_path / "tap"
    tap.write_bytes(tap_header(p, 6).encode() + states.numpy().tobytes() + ids.tobytes())
    staged = SampleWriter(tmp_path, format, new_lease()).stage(row, 0, tap)
    staged.temp.rename(staged.final)
    assert check_sample(FolderSamples(tmp_path), format, row, 0).bytes == staged.record.bytes == format.bytes(6, 1)
    states[:, 0] = 0
    tap.write_bytes(tap_header(p, 6).encode() + states.numpy().tobytes() + ids.tobytes())
    with pytest.raises(RowError, match="boundary 0") as e:
        SampleWriter(tmp_path, format, new_lease()).stage(row, 0, tap)
    assert e.value.code == ErrorCode.ZERO_STATES


def test_a_row_without_a_position_to_keep_is_an_error_of_the_row(tmp_path: Path) -> None:
    p = profile(hidden=16)
    ids = np.arange(6, dtype=np.int32)
    row = Row(row=0, input_ids=ids, loss_mask=np.zeros(6, np.uint8), source_id="a", line=1, error_code="", error_message="", source=0)
    tap = tmp_path / "tap"
    tap.write_bytes(StateMaker(p).tap_file(ids))
    with pytest.raises(RowError, match="loss mask is 0") as e:
        SampleWriter(tmp_path / "job", SampleFormat(p, (), "raw", "loss_mask"), new_lease()).stage(row, 0, tap)
    assert e.value.code == ErrorCode.NO_SUPERVISED_TOKEN and not list((tmp_path / "job").glob("**/data_*"))


def test_rows_are_reused_among_equal_positions_alone(tmp_path: Path) -> None:
    job = FinishedJob(tmp_path, (5, 9, 40), bad=(), hidden=64, mask=middle, positions="last:4")
    source = RowsFile(job.rows_path)
    rows = list(source.read(0, 3))

    def taken(positions: str) -> int:
        format = SampleFormat(job.profile, (), "raw", positions)
        new = tmp_path / "jobs" / f"new-{positions[-1]}"
        return len(reuse_rows(tmp_path, new, format, [job.path.name], 0, new_lease(), rows, dict.fromkeys(range(3), 0)))

    assert [taken(p) for p in ("all", "loss_mask", "last:5", "last:4")] == [0, 0, 0, 3]
    assert SampleFormat(job.profile).format_id == f"{job.profile.profile_id}-raw"  # as it was before there were positions
    source.close()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_trainers_format_takes_them(tmp_path: Path, name: str) -> None:
    job = FinishedJob(tmp_path / "job", mask=middle, positions="loss_mask")
    with pytest.raises(RequestError, match="loss_mask alone") as e:
        export_job(job.path, tmp_path / "out", FORMATS[name])
    assert e.value.code == ErrorCode.INVALID_REQUEST and "positions=all" in e.value.next_step
    assert not list(tmp_path.glob("out/**/*.*"))
    with pytest.raises(RequestError, match="positions"):
        compare_job_head(job.path, "nowhere", "http://127.0.0.1:9", samples=1)


def test_parity_looks_at_these_positions(tmp_path: Path) -> None:
    reference = Reference(str(make_model("llama", tmp_path / "model")))
    config = reference.model.config
    L, H = config.num_hidden_layers, config.hidden_size
    p = profile(hidden=H, layers=L, boundaries=(1, L - 1), dtype="F32", vocab=config.vocab_size)
    ids = list(range(5, 25))
    states = reference.states(ids)
    at = torch.tensor([3, 4, 9, 19], dtype=torch.int32)
    tensors = {
        INPUT_IDS: torch.tensor(ids, dtype=torch.int32),
        POSITIONS: at,
        AUX: torch.cat([states.boundary[b][at.long()] for b in p.boundaries], -1),
        FINAL_PRE: states.boundary[L][at.long()],
    }
    assert compare_files([tmp_path], p, reference, load=lambda _: tensors).ok
    tensors[AUX] = torch.cat([states.boundary[b + 1][at.long()] for b in p.boundaries], -1)
    wrong = compare_files([tmp_path], p, reference, load=lambda _: tensors)
    assert not wrong.ok and "one layer" in wrong.mistakes["1"]
    tensors[POSITIONS] = at - 1
    tensors[AUX] = torch.cat([states.boundary[b][at.long()] for b in p.boundaries], -1)
    assert not compare_files([tmp_path], p, reference, load=lambda _: tensors).ok
