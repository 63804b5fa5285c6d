"""Staging, the grouped commit and resuming: a file is whole or absent, the first commit wins, nothing finished is done again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from statetap.contracts.capture import new_lease
from statetap.contracts.errors import ErrorCode, RowError, StoreError
from statetap.contracts.layout import TEMP_PREFIX
from statetap.contracts.records import UNKNOWN_ENGINE, EngineStart, RowRecord
from statetap.contracts.sample_format import SampleFormat
from statetap.store.commit import Committer, Outcome
from statetap.store.ledger import JobLedger, LedgerWriter, fold, segments_by_batch
from statetap.store.resume import resume_batch
from statetap.store.rows import Row, RowsFile
from statetap.store.sample import SampleWriter, Staged, check_sample
from statetap.store.samples import FolderSamples
from tests.support.jobs import StateMaker, make_job, profile, sample_payload, token_rows


class Bench:
    """One batch of a job, and what an attempt at it needs."""

    def __init__(self, tmp: Path, rows: Sequence[Sequence[int]], **kw: object) -> None:
        self.profile = profile(dtype="F32", **kw)  # type: ignore[arg-type]
        self.tap = tmp / "tap"
        self.tap.mkdir()
        self.job_dir, rows_path, (self.batch,) = make_job(tmp / "store", self.profile, rows)
        self.source = RowsFile(rows_path)
        self.maker = StateMaker(self.profile)

    def row(self, n: int) -> Row:
        (row,) = self.source.read(n, n + 1)
        return row

    def tap_file(self, n: int) -> Path:
        path = self.tap / f"{n}.safetensors"
        path.write_bytes(self.maker.tap_file(self.row(n).input_ids))
        return path

    def stage(self, n: int, attempt: str, generation: int = 0) -> Staged:
        return SampleWriter(self.job_dir, SampleFormat(self.profile), attempt).stage(self.row(n), generation, self.tap_file(n))

    def commit(self, attempt: str, items: Sequence[Staged | RowRecord]) -> dict[int, Outcome]:
        told: list[Outcome] = []
        committer = Committer(self.job_dir, SampleFormat(self.profile), 0, attempt, told.extend)
        for item in items:
            committer.submit(item)
        committer.close()
        assert len({o.row for o in told}) == len(told) == len(items)
        return {o.row: o for o in told}

    def ledger(self) -> dict[int, RowRecord]:
        return fold(segments_by_batch(self.job_dir).get(0, []))

    def temps(self) -> list[str]:
        return [p.name for p in self.job_dir.rglob(f"{TEMP_PREFIX}*")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, token_rows(6, 20))


@pytest.mark.parametrize("tokens", [1, 20, 337, 338, 500, 4000])  # 337: the last that fits into one block
def test_a_committed_sample_holds_what_came_whatever_its_size(tmp_path: Path, tokens: int) -> None:
    bench = Bench(tmp_path, token_rows(1, tokens), hidden=96)
    outcome = bench.commit(new_lease(), [bench.stage(0, new_lease())])[0]
    assert outcome.record is not None and outcome.won
    path = bench.job_dir / outcome.record.path
    data = path.read_bytes()
    row = bench.row(0)
    assert len(data) == outcome.record.bytes and xxhash.xxh3_64_hexdigest(data) == outcome.record.xxh3
    assert sample_payload(data, bench.profile, tokens) == b"".join(bench.maker.states(row.input_ids))
    tensors = load_file(path)
    assert tensors["aux_hidden_states"].shape == (tokens, 3 * 96)
    assert np.array_equal(tensors["input_ids"], row.input_ids) and np.array_equal(tensors["loss_mask"], row.loss_mask)
    assert bench.ledger()[0] == outcome.record
    assert check_sample(FolderSamples(bench.job_dir), SampleFormat(bench.profile), row, 0).xxh3 == outcome.record.xxh3
    assert bench.temps() == [] and os.listdir(bench.tap) == []


@pytest.mark.parametrize("tokens", [20, 600])
def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    bench = Bench(tmp_path, token_rows(1, tokens), hidden=96)
    tap_file = bench.tap_file(0)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, memoryview(data)[:5000]))
    staged = SampleWriter(bench.job_dir, SampleFormat(bench.profile), "a" * 16).stage(bench.row(0), 0, tap_file)
    monkeypatch.setattr(os, "write", real)
    bench.commit("a" * 16, [staged])
    assert check_sample(FolderSamples(bench.job_dir), SampleFormat(bench.profile), bench.row(0), 0).xxh3 == staged.record.xxh3


@pytest.mark.parametrize("tokens", [20, 600])
@pytest.mark.parametrize("number, code", [(28, ErrorCode.STORE_FULL), (5, ErrorCode.STORE_IO)])
def test_a_write_that_fails_at_any_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, number: int, code: ErrorCode
) -> None:
    bench = Bench(tmp_path, token_rows(1, tokens), hidden=96)
    tap_file = bench.tap_file(0)
    writer = SampleWriter(bench.job_dir, SampleFormat(bench.profile), "a" * 16)
    real = os.write
    for nth in range(100):
        calls = iter(range(nth))

        def fail(fd: int, data: bytes, calls: Iterator[int] = calls) -> int:
            if next(calls, None) is None:
                raise OSError(number, os.strerror(number))
            return real(fd, data)

        monkeypatch.setattr(os, "write", fail)
        try:
            staged = writer.stage(bench.row(0), 0, tap_file)
        except StoreError as e:
            assert e.code is code and bench.temps() == []
        else:
            monkeypatch.setattr(os, "write", real)
            assert bench.commit("a" * 16, [staged])[0].won
            assert nth > (0 if tokens == 20 else 3)
            return
    raise AssertionError("it never met a run without an error")


def test_bad_states_stage_nothing(bench: Bench) -> None:
    path = bench.tap_file(0)
    data = bytearray(path.read_bytes())
    data[4096:4100] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(RowError) as e:
        SampleWriter(bench.job_dir, SampleFormat(bench.profile), "a" * 16).stage(bench.row(0), 0, path)
    assert e.value.code is ErrorCode.NONFINITE_STATES
    path.write_bytes(data[:5000])
    with pytest.raises(RowError) as e:
        SampleWriter(bench.job_dir, SampleFormat(bench.profile), "a" * 16).stage(bench.row(0), 0, path)
    assert e.value.code is ErrorCode.SHAPE_MISMATCH and "5000 bytes" in e.value.message
    path.unlink()
    with pytest.raises(RowError) as e:
        SampleWriter(bench.job_dir, SampleFormat(bench.profile), "a" * 16).stage(bench.row(0), 0, path)
    assert e.value.code is ErrorCode.CAPTURE_INCOMPLETE
    assert bench.temps() == []


def test_rows_without_a_file_go_through_the_same_ledger(bench: Bench) -> None:
    failed = RowRecord(row=1, state="failed", code="engine_rejected", message="no")
    told = bench.commit("a" * 16, [bench.stage(0, "a" * 16), failed])
    assert told[1].record == failed
    assert {r: x.state for r, x in bench.ledger().items()} == {0: "done", 1: "failed"}


def test_a_zombies_late_commit_is_discarded_and_writes_no_line(bench: Bench) -> None:
    zombie = bench.stage(0, "a" * 16)
    first = bench.commit("b" * 16, [bench.stage(0, "b" * 16)])[0]
    inode = os.stat(bench.job_dir / zombie.record.path).st_ino
    late = bench.commit("a" * 16, [zombie])[0]
    assert not late.won and late.record == first.record
    assert os.stat(bench.job_dir / zombie.record.path).st_ino == inode
    assert len((bench.job_dir / "ledger").iterdir().__next__().read_text().splitlines()) == 1
    assert len(list((bench.job_dir / "ledger").iterdir())) == 1
    assert bench.temps() == []


def test_a_late_group_reads_the_ledger_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with a look at the ledger for each row."""
    late = [bench.stage(n, "b" * 16) for n in range(6)]
    bench.commit("a" * 16, [bench.stage(n, "a" * 16) for n in range(6)])
    read: list[Path] = []
    monkeypatch.setattr("statetap.store.commit.segments_by_batch", lambda path: read.append(path) or segments_by_batch(path))
    assert not any(o.won for o in bench.commit("b" * 16, late).values()) and len(read) == 1


def test_a_zombie_whose_temp_was_swept_commits_nothing(bench: Bench) -> None:
    zombie = bench.stage(0, "a" * 16)
    resumed = resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "b" * 16)
    assert resumed.swept == 1 and list(resumed.open_rows) == list(range(6))
    late = bench.commit("a" * 16, [zombie])[0]
    assert late.record is None and late.error is None and not late.won
    assert bench.ledger() == {}


def test_a_link_made_twice_counts_as_won(bench: Bench) -> None:
    staged = bench.stage(0, "a" * 16)
    os.link(staged.temp, staged.final)  # the reply of a first try was lost
    assert bench.commit("a" * 16, [staged])[0].won
    assert bench.ledger()[0] == staged.record


def test_a_file_without_a_ledger_line_is_adopted_at_resume(bench: Bench) -> None:
    staged = bench.stage(3, "a" * 16)
    os.fsync(staged.fd)
    os.close(staged.fd)
    os.link(staged.temp, staged.final)  # and the worker died here
    resumed = resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "b" * 16)
    assert resumed.adopted == 1 and 3 not in resumed.open_rows
    assert bench.ledger()[3].xxh3 == staged.record.xxh3 == xxhash.xxh3_64_hexdigest(staged.final.read_bytes())
    assert bench.temps() == []


@pytest.mark.parametrize("at", [100, 4200, -1, -30])
def test_a_corrupt_file_without_a_ledger_line_is_removed_and_its_row_is_open(bench: Bench, at: int) -> None:
    staged = bench.stage(3, "a" * 16)
    os.close(staged.fd)
    data = bytearray(staged.temp.read_bytes())
    if at == 4200:
        data[4200:4204] = np.float32(np.inf).tobytes()
    else:
        data[at] ^= 1
    staged.final.write_bytes(data)
    resumed = resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "b" * 16)
    assert resumed.adopted == 0 and resumed.open_rows[3] == 0
    assert not staged.final.exists()


def test_a_corrupt_file_in_the_way_of_a_commit_is_replaced(bench: Bench) -> None:
    staged = bench.stage(0, "a" * 16)
    staged.final.write_bytes(b"half a fi")
    assert bench.commit("a" * 16, [staged])[0].won
    assert check_sample(FolderSamples(bench.job_dir), SampleFormat(bench.profile), bench.row(0), 0).xxh3 == bench.ledger()[0].xxh3


def test_a_whole_file_in_the_way_without_a_line_is_adopted(bench: Bench) -> None:
    other = bench.stage(0, "b" * 16)
    os.close(other.fd)
    os.link(other.temp, other.final)
    told = bench.commit("a" * 16, [bench.stage(0, "a" * 16)])[0]
    assert told.record is not None and not told.won
    assert bench.ledger()[0].xxh3 == other.record.xxh3


def test_a_done_row_whose_file_is_gone_or_short_is_open_with_the_next_generation(bench: Bench) -> None:
    bench.commit("a" * 16, [bench.stage(n, "a" * 16) for n in range(6)])
    (bench.job_dir / bench.ledger()[2].path).unlink()
    os.truncate(bench.job_dir / bench.ledger()[4].path, 4096)
    resumed = resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "b" * 16)
    assert resumed.open_rows == {2: 1, 4: 1}
    told = bench.commit("b" * 16, [bench.stage(n, "b" * 16, generation=1) for n in (2, 4)])
    assert told[2].won and bench.ledger()[2].path.endswith("data_2.g1.safetensors")
    again = resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "c" * 16)
    assert again.open_rows == {} and again.adopted == 0


def test_a_torn_last_ledger_line_only_costs_its_own_row(bench: Bench) -> None:
    bench.commit("a" * 16, [bench.stage(n, "a" * 16) for n in range(3)])
    segment = next((bench.job_dir / "ledger").iterdir())
    segment.write_bytes(segment.read_bytes()[:-9])
    resumed = resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "b" * 16)
    assert resumed.adopted == 1  # its file was there and whole
    assert list(resumed.open_rows) == [3, 4, 5]


def test_a_row_is_of_the_engine_that_its_segment_names_before_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with a name that counts as written though its append was cut back, and with one name a segment."""
    engines = [EngineStart(boot_id=b, sglang_version=v) for b, v in (("one", "1"), ("two", "2"))]
    now = engines[0]
    writer = LedgerWriter(bench.job_dir, 0, "a" * 16, lambda: now)
    done = [RowRecord(row=n, state="done", path=f"data_{n}") for n in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StoreError):
            writer.append(done[:1])
    writer.append(done[:2])
    now = engines[1]
    writer.append([replace(done[2], engine=UNKNOWN_ENGINE), done[3]])
    writer.close()
    with_engine = LedgerWriter(bench.job_dir, 0, "b" * 16, lambda: now)
    with_engine.append([RowRecord(row=4, state="failed"), RowRecord(row=5, state="skipped")])  # captured by none
    with_engine.close()
    ledger = JobLedger(bench.job_dir)
    assert [r.engine for _, r in sorted(ledger.last(0).items())] == ["one", "one", "?", "two", "", ""]
    assert list(ledger.engines.values()) == engines
    text = (bench.job_dir / "ledger" / f"0.{'a' * 16}.jsonl").read_text()
    assert text.count('"boot_id"') == 2 and text.count('"row"') == 4


def test_a_file_beats_a_failure_of_the_same_generation(bench: Bench) -> None:
    bench.commit("a" * 16, [RowRecord(row=0, state="failed", code="engine_timeout")])
    bench.commit("b" * 16, [bench.stage(0, "b" * 16)])
    assert bench.ledger()[0].state == "done"


def test_when_the_ledger_cannot_be_written_no_row_is_told_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = bench.stage(0, "a" * 16)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", full)
    told = bench.commit("a" * 16, [staged])[0]
    monkeypatch.undo()
    assert told.record is None and told.error is not None and told.error.code is ErrorCode.STORE_FULL
    assert bench.ledger() == {}
    assert resume_batch(bench.job_dir, SampleFormat(bench.profile), bench.batch, bench.source, "b" * 16).adopted == 1
