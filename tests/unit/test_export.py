"""Exports in the trainers' formats: layout, numbers, refusals, going on after a cut. The readers themselves: tests/trainers."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from typer.testing import CliRunner

from statetap.cli.commands.exporting import parse_rows
from statetap.cli.main import app
from statetap.contracts.errors import ErrorCode, RequestError, StatetapError, StoreError
from statetap.contracts.layout import COMPLETE, MANIFEST, NORM
from statetap.store.acks import Acks, save_acks
from statetap.store.complete import MANIFEST_SCHEMA, ROWS_PER_GROUP
from statetap.store.export import files, run
from statetap.store.export.base import FormatName, Item, layer_text
from statetap.store.export.checkpoint import own
from statetap.store.export.registry import FORMATS
from statetap.store.export.run import ExportReport, Progress
from statetap.store.export.source import Source
from statetap.store.export.vocab import draft_tokens
from statetap.store.reader import JobDataset
from tests.support.finished import DTYPES, FinishedJob, marker, within_an_ulp

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path: Path) -> FinishedJob:
    return FinishedJob(tmp_path / "store")


def export(job: FinishedJob, out: Path, name: FormatName, **options: Any) -> ExportReport:
    return run.export_job(job.path, out, FORMATS[name], **options)


def files_of(out: Path) -> dict[str, tuple[int, bytes]]:
    """(inode, bytes) by path, without what is said of the export."""
    found = {str(p.relative_to(out)): p for p in out.rglob("*") if p.is_file() and not p.name.startswith("EXPORT.")}
    return {name: (p.stat().st_ino, p.read_bytes()) for name, p in sorted(found.items())}


SHAPES: dict[FormatName, tuple[dict[int, str], dict[str, tuple[Any, ...]]]] = {
    "specforge": (
        {0: "rows_0-2000/data_0.ckpt", 4: "rows_0-2000/data_4.ckpt"},
        {"input_ids": ("T",), "loss_mask": ("T",), "hidden_state": (1, "T", 8), "aux_hidden_state": (1, "T", 24)},
    ),
    "angelslim": (
        {0: "rows_0-5000/data_0.ckpt", 4: "rows_0-5000/data_4.ckpt"},
        {"input_ids": (1, "T"), "loss_mask": (1, "T"), "hidden_states": (1, "T", 24), "target_hiddens": (1, "T", 8)},
    ),
    "modelopt": (
        {0: "id-0-0.pt", 4: "id-4-4.pt"},
        {"input_ids": ("T",), "loss_mask": ("T",), "hidden_states": ("T", 8), "aux_hidden_states": ("T", 24)},
    ),
    "eagle1": (
        {0: "ge_data/data_0.ckpt", 4: "ge_data/data_4.ckpt"},
        {"input_ids": ("T",), "loss_mask": ("T",), "hidden_state": ("T", 8)},
    ),
    "speculators": (
        {0: "hidden_states/hs_0.safetensors", 4: "hidden_states/hs_3.safetensors"},
        {"hidden_states": ("T", 4, 8), "token_ids": ("T",)},
    ),
    "vllm": ({0: "0.safetensors", 4: "4.safetensors"}, {"hidden_states": ("T", 4, 8), "token_ids": ("T",)}),
}


def test_every_format_is_known_by_its_name() -> None:
    assert set(FORMATS) == set(SHAPES) == set(typing.get_args(FormatName))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_has_the_formats_name_keys_shapes_and_the_models_dtype(tmp_path: Path, name: FormatName, dtype: str) -> None:
    job, out = FinishedJob(tmp_path / "store", dtype=dtype), tmp_path / "out"
    report = export(job, out, name)
    assert report.ok and (report.written, report.kept) == (4, 0)
    paths, shapes = SHAPES[name]
    for row, path in paths.items():
        # weights_only: plain tensors, numbers and text, nothing that runs.
        got = load_file(out / path) if path.endswith(".safetensors") else torch.load(out / path, weights_only=True)
        T = len(job.tensors(row)["input_ids"])
        tensors = {k: v for k, v in got.items() if isinstance(v, torch.Tensor)}
        assert {k: tuple(v.shape) for k, v in tensors.items()} == {k: tuple(T if s == "T" else s for s in v) for k, v in shapes.items()}
        assert {v.dtype for k, v in tensors.items() if "hidden" in k} == {DTYPES[dtype]}
        assert {v.dtype for k, v in tensors.items() if "hidden" not in k} == {torch.int64}
        assert sum(v.nbytes for v in tensors.values()) > (out / path).stat().st_size - 4096  # no storage of a neighbour came along
        if name == "modelopt":
            assert got["conversation_id"] == f"id-{row}" and got["hidden_states_prenorm"] is False
    assert {str(p.relative_to(out)) for p in out.rglob("*") if p.suffix in (".ckpt", ".pt", ".safetensors")} >= set(paths.values())
    said = marker(out)
    assert said["counts"] == {"rows": 4, "tokens": 16, "bytes": sum((out / p).stat().st_size for p in _listed(out))}
    assert said["job"] == "job-test" and said["profile"] == job.profile.profile_id and said["dtype"] == dtype
    assert said["list_xxh3"] == xxhash.xxh3_64_hexdigest((out / "EXPORT.jsonl").read_bytes())
    for path, xxh3 in _listed(out).items():
        assert xxhash.xxh3_64_hexdigest((out / path).read_bytes()) == xxh3


def _listed(out: Path) -> dict[str, str]:
    lines = map(json.loads, (out / "EXPORT.jsonl").read_text().splitlines()[1:])
    return {line["path"]: line["xxh3"] for line in lines}


def test_a_tensor_brings_its_own_bytes_only() -> None:
    whole = torch.zeros(1000)
    for part in (whole[10:20], whole.view(10, 100)[:, 5], whole.view(10, 100).t()[:3]):
        got = own(part)
        assert torch.equal(got, part) and got.untyped_storage().nbytes() == 4 * part.numel()
    assert own(whole) is whole


def test_post_is_derived_as_the_reader_derives_it_and_taken_as_it_is_where_it_was_captured(tmp_path: Path) -> None:
    for final in ("pre", "post", "both"):
        job, out = FinishedJob(tmp_path / final, final=final), tmp_path / f"{final}-out"
        export(job, out, "specforge")
        assert marker(out)["final_derived"] is (final == "pre")
        for i, row in enumerate(job.rows):
            got = torch.load(out / f"rows_0-2000/data_{row}.ckpt", weights_only=True)["hidden_state"][0]
            assert torch.equal(got, JobDataset(job.path, final="post")[i]["final_hidden_states"])
            assert within_an_ulp(got, job.post(row))
            assert not torch.equal(got, job.tensors(row).get("final_hidden_states_prenorm", got + 1))


@pytest.mark.parametrize(
    ("captured", "name", "options", "says"),
    [
        ("post", "vllm", {}, "vLLM needs the pre-norm state.*'post': a post-norm state cannot be turned back"),
        ("post", "speculators", {}, "speculators needs the pre-norm state"),
        ("post", "modelopt", {"final": "pre"}, "ModelOpt needs the pre-norm state"),
        ("none", "specforge", {}, "SpecForge needs the post-norm state.*'none': it has no final state"),
        ("none", "vllm", {}, "it has no final state"),
        ("both", "specforge", {"final": "pre"}, "SpecForge files hold the post-norm state"),
        ("both", "vllm", {"final": "post"}, "vLLM files hold the pre-norm state"),
        ("pre", "eagle1", {"boundaries": (2,)}, "EAGLE-1 files hold no states of boundaries"),
        ("pre", "specforge", {"boundaries": (2, 3)}, r"\[3\] asked for, \[2, 16, 29\] were captured"),
        ("pre", "vllm", {"compressed": True}, "vLLM does not read compressed files"),
        ("pre", "vllm", {"draft_vocab": 5}, "vLLM reads no vocabulary mapping"),
        ("pre", "specforge", {"draft_vocab": 51}, "51 is more than the model's 50"),
        ("pre", "specforge", {"rows": (4, 4)}, "4-4 holds no row"),
        ("pre", "specforge", {"rows": (9, 12)}, "holds no row"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_written(
    tmp_path: Path, captured: str, name: FormatName, options: dict[str, Any], says: str
) -> None:
    job, out = FinishedJob(tmp_path / "store", final=captured), tmp_path / "out"
    with pytest.raises(RequestError, match=says) as e:
        export(job, out, name, **options)
    assert e.value.code is ErrorCode.INVALID_REQUEST and e.value.next_step
    assert not out.exists()


def test_a_job_that_is_not_complete_or_lacks_its_norm_is_refused(job: FinishedJob, tmp_path: Path) -> None:
    (job.path / NORM).rename(tmp_path / NORM)
    with pytest.raises(StoreError, match="final norm") as e:
        export(job, tmp_path / "out", "specforge")
    assert e.value.code is ErrorCode.FILE_MISSING
    assert export(job, tmp_path / "vllm", "vllm").ok  # which needs none
    (job.path / COMPLETE).unlink()
    with pytest.raises(StoreError, match="COMPLETE marker is not written") as e:
        export(job, tmp_path / "out", "vllm")
    assert e.value.code is ErrorCode.INCOMPLETE
    with pytest.raises(RequestError) as missing:
        run.export_job(tmp_path / "nothing", tmp_path / "out", FORMATS["vllm"])
    assert missing.value.code is ErrorCode.NOT_FOUND and not (tmp_path / "out").exists()


def test_layers_are_named_in_the_systems_own_terms(tmp_path: Path) -> None:
    assert (
        layer_text("SpecForge", FORMATS["specforge"].layer_ids((2, 16, 30), 33), (2, 16, 30))
        == "SpecForge ids 1, 15, 29 = boundaries 2, 16, 30"
    )
    job = FinishedJob(tmp_path / "store", boundaries=(0, 2, 16, 29))
    export(job, tmp_path / "a", "speculators", boundaries=(2, 16, 29))
    assert marker(tmp_path / "a")["layers"]["ids"] == [2, 16, 29, 32] and marker(tmp_path / "a")["notes"] == []
    export(job, tmp_path / "b", "angelslim", boundaries=(16, 0))
    said = marker(tmp_path / "b")
    assert said["layers"]["text"] == "AngelSlim ids 15, none = boundaries 16, 0"
    notes = " ".join(said["notes"])
    assert "expect three boundaries, these are 2" in notes and "no id in AngelSlim" in notes and "vocab_mapping.pt" in notes
    planes = job.tensors(0)["aux_hidden_states"].split(8, dim=1)
    got = torch.load(tmp_path / "b/rows_0-5000/data_0.ckpt", weights_only=True)["hidden_states"][0]
    assert torch.equal(got, torch.cat([planes[2], planes[0]], dim=1))
    export(job, tmp_path / "c", "eagle1")
    assert marker(tmp_path / "c")["layers"] is None and marker(tmp_path / "c")["boundaries"] == []


def test_a_range_of_rows_is_half_open_and_freed_rows_are_left_out(job: FinishedJob, tmp_path: Path) -> None:
    export(job, tmp_path / "a", "vllm", rows=(0, 3))
    assert sorted(files_of(tmp_path / "a")) == ["0.safetensors", "2.safetensors"]
    assert marker(tmp_path / "a")["rows"] == {"start": 0, "stop": 3}
    save_acks(job.path, Acks(ranges=((2, 4),), rows=2, bytes=10))
    job.file(2).unlink()
    job.file(3).unlink()
    report = export(job, tmp_path / "b", "speculators")
    assert report.ok and len(list((tmp_path / "b" / "hidden_states").iterdir())) == 2
    assert torch.equal(load_file(tmp_path / "b/hidden_states/hs_1.safetensors")["token_ids"].int(), job.tensors(4)["input_ids"])
    assert "2 rows were freed" in marker(tmp_path / "b")["notes"][0]
    with pytest.raises(RequestError, match=r"freed: 0, not 2"):  # the numbers of a dense format would shift
        export(job, tmp_path / "a", "vllm", rows=(0, 3))


def test_compressed_files_hold_the_same(job: FinishedJob, tmp_path: Path) -> None:
    export(job, tmp_path / "plain", "specforge")
    export(job, tmp_path / "gz", "specforge", compressed=True)
    plain, packed = files_of(tmp_path / "plain"), files_of(tmp_path / "gz")
    assert sorted(packed) == [f"{name}.gz" for name in sorted(plain)]
    assert [gzip.decompress(data) for _, data in packed.values()] == [data for _, data in plain.values()]


def test_names_from_a_source_stay_in_the_folder_and_apart() -> None:
    def name(row: int, source_id: str) -> str:
        return FORMATS["modelopt"].path(Item(index=0, row=row, source_id=source_id, tokens=1, bytes=0, path="", xxh3=""))

    ids = ["../../etc/passwd", "..", ".hidden", "a/b", "", "x" * 500, "ü \n\0"]
    names = [name(7, i) for i in ids]
    assert all(n.endswith("7.pt") and "/" not in n and not n.startswith(".") and len(n) < 130 for n in names), names
    assert name(1, "same") != name(2, "same") and name(1, "a-2") != name(2, "a")


def test_a_second_run_writes_nothing_and_a_lost_file_alone_is_written_again(job: FinishedJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(job, out, "speculators")
    before, said, listed = files_of(out), marker(out), (out / "EXPORT.jsonl").read_bytes()
    again = export(job, out, "speculators")
    assert (again.written, again.kept) == (0, 4) and again.export == said and files_of(out) == before
    (out / "hidden_states/hs_1.safetensors").unlink()
    os.truncate(out / "hidden_states/hs_3.safetensors", 100)
    marked: list[bool] = []
    again = export(job, out, "speculators", progress=lambda _: marked.append((out / "EXPORT.json").exists()))
    assert (again.written, again.kept) == (2, 2) and marked == [False]  # it was no whole export meanwhile
    after = files_of(out)
    assert {n: data for n, (_, data) in after.items()} == {n: data for n, (_, data) in before.items()}
    kept = ("hidden_states/hs_0.safetensors", "hidden_states/hs_2.safetensors")
    assert [after[n][0] for n in kept] == [before[n][0] for n in kept]
    assert (out / "EXPORT.jsonl").read_bytes() == listed and marker(out)["list_xxh3"] == said["list_xxh3"]
    (out / "token_freq.pt").unlink()
    assert export(job, out, "speculators").written == 0 and (out / "token_freq.pt").exists()


@pytest.mark.parametrize("tail", [b"", b'{"row":4,"pa', b"\xff\xfe\n", b'{"no":1}\n'])
def test_a_torn_list_is_taken_as_far_as_it_goes(job: FinishedJob, tmp_path: Path, tail: bytes) -> None:
    out = tmp_path / "out"
    export(job, out, "specforge")
    lines = (out / "EXPORT.jsonl").read_bytes().splitlines(keepends=True)
    (out / "EXPORT.json").unlink()
    (out / "EXPORT.jsonl").write_bytes(b"".join(lines[:3]) + tail)
    report = export(job, out, "specforge")
    assert (report.written, report.kept) == (2, 2) and (out / "EXPORT.jsonl").read_bytes() == b"".join(lines)


def test_it_is_killed_at_every_step_and_the_next_run_brings_it_to_its_end(tmp_path: Path) -> None:
    job = FinishedJob(tmp_path / "store", (5, 9, 3))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.export_crasher", job.path, tmp_path, "speculators"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == [] and result["points"] >= 25, result


def test_a_folder_with_something_else_in_it_is_refused(job: FinishedJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(job, out, "specforge")
    before = files_of(out)
    for name, options in (("angelslim", {}), ("specforge", {"boundaries": (2, 16)}), ("specforge", {"rows": (0, 2)})):
        with pytest.raises(RequestError, match="holds another export") as e:
            export(job, out, name, **options)  # type: ignore[arg-type]
        assert e.value.code is ErrorCode.CONFLICT
    other = tmp_path / "other"
    other.mkdir()
    (other / "data_9.ckpt").write_bytes(b"somebody's")
    (other / ".tmp-0123456789abcdef").touch()
    with pytest.raises(RequestError, match="not empty and holds no export"):
        export(job, other, "specforge")
    assert sorted(p.name for p in other.iterdir()) == [".tmp-0123456789abcdef", "data_9.ckpt"]
    with pytest.raises(RequestError, match="the job's own folder"):
        export(job, job.path / "out", "specforge")
    with files.Folder(out), pytest.raises(RequestError, match="another process exports into"):
        export(job, out, "specforge")
    assert files_of(out) == before and export(job, out, "specforge").written == 0


def test_a_corrupt_or_missing_row_is_named_and_the_rest_is_exported(job: FinishedJob, tmp_path: Path) -> None:
    out, bad, gone = tmp_path / "out", job.file(2), job.file(4)
    data = bad.read_bytes()
    bad.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]) if len(data) > 5000 else bad.write_bytes(data[:-1] + b"\x07")
    gone.rename(tmp_path / "kept")
    report = export(job, out, "specforge")
    assert not report.ok and (report.written, report.kept, report.bad) == (2, 0, 2)
    assert [(p.row, p.code) for p in report.problems] == [(2, "file_corrupt"), (4, "file_missing")]
    assert not (out / "EXPORT.json").exists()
    first = files_of(out)
    assert sorted(first) == ["rows_0-2000/data_0.ckpt", "rows_0-2000/data_3.ckpt"]
    bad.write_bytes(data)
    (tmp_path / "kept").rename(gone)
    report = export(job, out, "specforge")
    assert report.ok and (report.written, report.kept) == (2, 2) and marker(out)["counts"]["rows"] == 4
    assert {n: files_of(out)[n] for n in first} == first
    lines = [json.loads(line) for line in (out / "EXPORT.jsonl").read_text().splitlines()[1:]]
    assert [line["row"] for line in lines] == [0, 2, 3, 4] and all("code" not in line for line in lines)


def test_a_disk_without_room_is_refused_at_once_and_one_that_fills_up_is_gone_on_with(
    job: FinishedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as m:
        m.setattr(run, "free_bytes", lambda _: 5_000)
        with pytest.raises(StoreError, match="more than are free") as e:
            export(job, out, "specforge")
        assert e.value.code is ErrorCode.STORE_FULL and files_of(out) == {}
    monkeypatch.setattr(run, "GROUP_ROWS", 1)
    real: Callable[[int, Any], None] = files.write_all
    for nth in (0, 45, 90):
        left = iter(range(nth))

        def write(fd: int, data: Any, left: Any = left) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, data)

        with monkeypatch.context() as m:
            m.setattr(files, "write_all", write)
            with pytest.raises(StatetapError) as full:
                export(job, out, "specforge", threads=1)
        assert full.value.code is ErrorCode.STORE_FULL
        assert [p.name for p in out.rglob(".tmp-*")] == [] and not (out / "EXPORT.json").exists()
    report = export(job, out, "specforge")
    assert report.ok and report.kept > 0 and report.written + report.kept == 4


def test_the_draft_vocabulary_is_the_most_frequent_supervised_tokens(job: FinishedJob, tmp_path: Path) -> None:
    assert draft_tokens({7: 3, 2: 3, 9: 5, 4: 1}, 3, 10) == [2, 7, 9]
    assert draft_tokens({7: 3, 2: 3, 9: 5, 4: 1}, 2, 10) == [2, 9]  # ties: the lower id
    assert draft_tokens({9: 1}, 3, 10) == [0, 1, 9]
    export(job, tmp_path / "out", "angelslim", draft_vocab=10)
    mapping = torch.load(tmp_path / "out/vocab_mapping.pt", weights_only=True)
    tokens = mapping["d2t"] + torch.arange(10)
    assert mapping["t2d"].nonzero().flatten().tolist() == tokens.tolist() and mapping["t2d"].shape == (50,)
    export(job, tmp_path / "out", "angelslim", draft_vocab=20)  # another size: the rows are kept
    assert torch.load(tmp_path / "out/vocab_mapping.pt", weights_only=True)["t2d"].sum() == 20


def test_memory_does_not_grow_with_rows(job: FinishedJob) -> None:
    def peak(rows: int) -> int:
        row = range(rows)
        columns = {name: [""] * rows for name in MANIFEST_SCHEMA.names}
        columns |= {"row": row, "state": ["done"] * rows, "source_id": [f"id-{r}" for r in row], "path": [f"rows/data_{r}" for r in row]}
        columns |= dict.fromkeys(("generation", "tokens", "bytes"), [1] * rows)  # type: ignore[arg-type]
        pq.write_table(pa.table(columns, schema=MANIFEST_SCHEMA), job.path / MANIFEST, row_group_size=ROWS_PER_GROUP)
        spec = json.loads((job.path / "job.json").read_text())
        (job.path / "job.json").write_text(json.dumps(spec | {"rows": rows}))
        del columns
        source = Source(job.path, FORMATS["vllm"], boundaries=None, final=None, rows=None)
        tracemalloc.start()
        arrow = pa.total_allocated_bytes()
        most = 0
        for n, item in enumerate(source.items()):
            assert item.index == item.row == n
            most = max(most, pa.total_allocated_bytes() - arrow) if n % 1000 == 0 else most
        assert n == rows - 1
        most += tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(2 * ROWS_PER_GROUP) < 1.3 * peak(ROWS_PER_GROUP)


def test_the_command_says_what_it_did_and_ends_with_the_right_code(job: FinishedJob, tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "out"
    done = runner.invoke(app, ["export", str(job.path), "--format", "specforge", "--out", str(out), "--json", "--draft-vocab", "9"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["ok"] and told["written"] == 4 and told["export"] == marker(out)
    done = runner.invoke(app, ["export", str(tmp_path / "store"), "--format", "specforge", "--out", str(out), "--draft-vocab", "9"])
    assert done.exit_code == 0 and "SpecForge ids 1, 15, 28 = boundaries 2, 16, 29" in done.stdout
    assert "4 rows" in done.stdout and "4 of them were there" in done.stdout and "post-norm (derived from pre), BF16" in done.stdout
    job.file(0).unlink()
    done = runner.invoke(
        app, ["export", str(job.path), "--format", "vllm", "--out", str(tmp_path / "b"), "--rows", "0-3", "--boundaries", "29,2"]
    )
    assert done.exit_code == 7 and "row 0: file_missing" in done.stdout and "NOT whole" in done.stdout
    done = runner.invoke(app, ["export", str(job.path), "--format", "vllm", "--out", str(tmp_path / "c"), "--boundaries", "2,x"])
    assert isinstance(done.exception, RequestError) and not (tmp_path / "c").exists()
    assert runner.invoke(app, ["export", str(job.path), "--format", "nonsense", "--out", str(tmp_path / "c")]).exit_code == 2


def test_rows_are_a_number_or_a_range() -> None:
    assert parse_rows("2000") == (0, 2000) and parse_rows("2000-4000") == (2000, 4000) and parse_rows("10_000") == (0, 10_000)
    for text in ("", "a", "-3", "1-", "1-2-3", "1:2"):
        with pytest.raises(RequestError, match="rows"):
            parse_rows(text)


def test_progress_counts_every_row_once(job: FinishedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GROUP_ROWS", 1)
    told: list[Progress] = []
    report = export(job, tmp_path / "out", "specforge", progress=told.append)
    assert [t.done for t in told] == [1, 2, 3, 4] and {t.rows for t in told} == {4}
    assert told[-1].bytes == report.export["counts"]["bytes"]
