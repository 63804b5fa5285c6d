"""A whole ingestion: what lands in rows.arrow and report.json."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from statetap.contracts.layout import REPORT, ROWS, ROWS_INDEX
from statetap.contracts.records import DatasetSpec, DatasetStatus
from statetap.datasets import ingest as module
from statetap.datasets.ingest import StoppedError, ingest
from statetap.store.rows import Row, RowsFile
from tests.support import made_tokenizer as made

SHARED = Path(__file__).parents[3] / "shared" / "data"
EXAMPLES = Path(__file__).parents[2] / "examples" / "conversations.jsonl"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., DatasetStatus]:
    def make(source: bytes | list | Path, **spec: Any) -> DatasetStatus:
        path = source if isinstance(source, Path) else tmp_path / "source"
        if isinstance(source, list):
            source = b"".join(json.dumps(r).encode() + b"\n" for r in source)
        if isinstance(source, bytes):
            path.write_bytes(source)
        return ingest(DatasetSpec(**{"dataset_id": "d", "name": "n", "path": str(path), **spec}), tmp_path, lambda s: None)

    return make


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rows_of(store: Path) -> list[Row]:
    file = RowsFile(store / "datasets/d" / ROWS)
    return list(file.read(0, file.rows))


def test_row_r_is_source_row_r_and_64_stand_in_a_batch(run, tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(i % 7 + 1)), "loss_mask": [1] * (i % 7 + 1), "id": f"s{i}"} for i in range(200)]
    rows[70] = {"input_ids": [-1]}
    status = run(rows)
    assert (status.state, status.rows, status.accepted, status.rejected) == ("ready", 200, 199, 1)
    assert status.tokens == status.supervised_tokens == sum(len(r["input_ids"]) for i, r in enumerate(rows) if i != 70)
    assert status.max_tokens == 7
    assert status.errors == {"bad_token_id": 1}
    assert status.bytes_read == status.bytes_total > 0
    file = RowsFile(tmp_path / "datasets/d" / ROWS)
    assert [len(x) for x in file.lengths()] == [64, 64, 64, 8]
    got = list(file.read(0, 200))
    assert [r.input_ids.tolist() for r in got] == [[] if i == 70 else r["input_ids"] for i, r in enumerate(rows)]
    assert [(r.row, r.line, r.source_id) for r in got] == [(i, i + 1, "71" if i == 70 else f"s{i}") for i in range(200)]
    assert (got[70].error_code, got[70].error_message) == ("bad_token_id", "line 71: input_ids[0] is -1, outside [0, 2147483648)")
    assert status.examples == [{"row": 70, "line": 71, "code": "bad_token_id", "message": got[70].error_message}]


def test_the_report_is_the_status_and_a_second_run_returns_it(run, tmp_path: Path) -> None:
    status = run([{"input_ids": [1]}])
    assert DatasetStatus.from_dict(json.loads((tmp_path / "datasets/d" / REPORT).read_text())) == status
    before = os.stat(tmp_path / "datasets/d" / ROWS)
    assert run([{"input_ids": [2]}]) == status
    assert os.stat(tmp_path / "datasets/d" / ROWS) == before


def test_the_content_hash_is_of_ids_masks_and_their_lengths(run) -> None:
    base = [{"input_ids": [1, 2]}, {"input_ids": [3]}]
    hashes = [
        run(rows, dataset_id=f"d{i}").content_hash
        for i, rows in enumerate(
            [
                base,
                [{**r, "id": "other"} for r in base],  # the same
                [{"input_ids": [1]}, {"input_ids": [2, 3]}],
                [{"input_ids": [1, 2], "loss_mask": [0, 1]}, base[1]],
                list(reversed(base)),
                [*base, {"input_ids": []}],
            ]
        )
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 5
    assert all(len(h) == 32 for h in hashes)


def test_conversations_and_sharegpt_give_the_same_rows(run, tmp_path: Path, tokenizer: str) -> None:
    turns = [("human", "Who are you?"), ("gpt", "A model."), ("human", "Bye"), ("gpt", "Goodbye!")]
    sharegpt = [{"id": i, "conversations": [{"from": a, "value": f"{b} {i}"} for a, b in turns]} for i in range(70)]
    roles = {"human": "user", "gpt": "assistant"}
    messages = [{"messages": [{"role": roles[t["from"]], "content": t["value"]} for t in r["conversations"]]} for r in sharegpt]
    a = run(json.dumps(sharegpt, indent=1).encode(), tokenizer=tokenizer)
    b = run(messages, tokenizer=tokenizer, dataset_id="e")
    assert a.state == b.state == "ready"
    assert a.content_hash == b.content_hash
    assert 0 < a.supervised_tokens < a.tokens
    assert [r.source_id for r in rows_of(tmp_path)] == [str(i) for i in range(70)]


def test_the_first_good_row_decides_the_kind(run, tmp_path: Path) -> None:
    rows = [
        {"question": "?"},
        {"messages": "none"},
        {"input_ids": [1]},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"input_ids": [2]},
    ]
    status = run(rows)
    assert (status.state, status.accepted, status.errors) == ("ready", 2, {"bad_row": 3})
    assert "no 'input_ids'" in rows_of(tmp_path)[3].error_message


def test_long_rows_are_rejected_or_cut_as_asked(run, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, {"input_ids": [1, 2]}]
    status = run(rows, max_length=2)
    assert (status.accepted, status.errors) == (1, {"prompt_too_long": 2})
    assert rows_of(tmp_path)[0].error_message == "line 1: 3 tokens, max_length is 2"
    status = run(rows, max_length=2, truncate=True, dataset_id="e")
    assert (status.accepted, status.tokens, status.errors) == (2, 4, {"no_supervised_token": 1})


def test_ids_are_checked_against_a_named_tokenizer(run, tokenizer: str) -> None:
    assert run([{"input_ids": [1, 5000]}, {"input_ids": [1]}], tokenizer=tokenizer).errors == {"bad_token_id": 1}


def test_only_the_first_hundred_bad_rows_are_listed(run) -> None:
    status = run([{"input_ids": []}] * 150 + [{"input_ids": [1]}])
    assert (status.rejected, len(status.examples)) == (150, 100)


def test_duplicate_ids_are_rows_of_their_own(run, tmp_path: Path) -> None:
    assert run([{"id": "x", "input_ids": [1]}, {"id": "x", "input_ids": [1]}]).accepted == 2
    assert [r.source_id for r in rows_of(tmp_path)] == ["x", "x"]


@pytest.mark.parametrize(
    ("source", "spec", "code", "message"),
    [
        (b"", {}, "dataset_failed", "has no rows"),
        (b"[]", {}, "dataset_failed", "has no rows"),
        (b"{broken\n{again\n", {}, "bad_row", "none of the 2 rows is good (bad_row 2); the first: line 1: not JSON"),
        (b'[{"input_ids":[]},{"input_ids":[]}]', {}, "empty_prompt", "the first: element 1:"),
        (b'[{"input_ids":[1]},{"input_ids":[1', {}, "dataset_failed", "breaks off in or after element 2"),
        (
            b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo"}]}',
            {},
            "dataset_failed",
            "a tokenizer has to be named",
        ),
        (b'{"input_ids":[1]}', {"format": "parquet"}, "invalid_request", "'parquet' is none of auto"),
        (
            b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Yo"}]}',
            {"tokenizer": "/does/not/exist"},
            "dataset_failed",
            "line 1 is a conversation: the tokenizer '/does/not/exist' cannot be loaded",
        ),
        (b'{"input_ids":[1]}', {"tokenizer": "/does/not/exist", "format": "messages"}, "dataset_failed", "cannot be loaded"),
        (b'{"input_ids":[1]}', {"path": "/does/not/exist"}, "dataset_failed", "cannot open /does/not/exist"),
    ],
)
def test_a_dataset_that_cannot_be_had_says_why_and_leaves_no_rows(
    run, tmp_path: Path, source: bytes, spec: dict, code: str, message: str
) -> None:
    status = run(source, **spec)
    assert status.state == "failed"
    assert status.error is not None and status.error["code"] == code
    assert message in status.error["message"]
    assert os.listdir(tmp_path / "datasets/d") == [REPORT]


@pytest.mark.parametrize("format", ["auto", "tokenized"])
def test_tokenised_rows_do_not_need_the_models_tokenizer(run, format: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is the default where nothing is named, and may need a package that is not here. Seen to fail so, on a model without a tokenizer."""
    status = run([{"input_ids": [1, 99_999]}], tokenizer="/does/not/exist", format=format)
    assert (status.state, status.accepted) == ("ready", 1)
    assert "are not held against the vocabulary: the tokenizer" in caplog.text


def test_conversations_need_a_chat_template(run, tmp_path: Path) -> None:
    name = made.make_tokenizer(tmp_path / "bare", None)
    status = run([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], tokenizer=name)
    assert status.error is not None and "has no chat template" in status.error["message"]


def test_a_stopped_ingestion_leaves_nothing_and_starts_over_to_the_same_result(run, tmp_path: Path) -> None:
    rows = [{"input_ids": [i, i + 1]} for i in range(300)]
    run(rows, dataset_id="whole")
    seen: list[DatasetStatus] = []
    spec = DatasetSpec(dataset_id="d", name="n", path=str(tmp_path / "source"))
    with pytest.raises(StoppedError):
        ingest(spec, tmp_path, seen.append, lambda: bool(seen))
    assert seen[0].state == "ingesting" and seen[0].rows == 64
    assert os.listdir(tmp_path / "datasets/d") == []
    (tmp_path / "datasets/d/.tmp-0123-rows.arrow").write_bytes(b"left by a dead one")
    assert ingest(spec, tmp_path, seen.append).content_hash == run(rows, dataset_id="whole").content_hash
    assert sorted(os.listdir(tmp_path / "datasets/d")) == [REPORT, ROWS, ROWS_INDEX]


def test_one_that_lost_its_files_to_another_writes_no_report(run, tmp_path: Path) -> None:
    (tmp_path / "source").write_text('{"input_ids":[1]}')

    def other_process(_: DatasetStatus) -> None:
        for name in os.listdir(tmp_path / "datasets/d"):
            os.unlink(tmp_path / "datasets/d" / name)

    with pytest.raises(StoppedError, match="another process"):
        ingest(DatasetSpec(dataset_id="d", name="n", path=str(tmp_path / "source")), tmp_path, other_process)
    assert os.listdir(tmp_path / "datasets/d") == []


def test_a_tokenizer_that_fails_on_one_row_fails_that_row(run, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from statetap.datasets.mask import Masker

    real = Masker.encode

    def encode(self: Masker, conversations: list) -> list:
        if any("boom" in c.messages[0]["content"] for c in conversations):
            raise RuntimeError("stack overflow in the merges")
        return real(self, conversations)

    monkeypatch.setattr(Masker, "encode", encode)
    rows = [
        {"messages": [{"role": "user", "content": "boom" if i == 3 else "Hi"}, {"role": "assistant", "content": "Yo"}]} for i in range(8)
    ]
    status = run(rows, tokenizer=tokenizer)
    assert (status.state, status.accepted, status.errors) == ("ready", 7, {"bad_row": 1})
    assert "stack overflow" in rows_of(tmp_path)[3].error_message


def test_big_conversations_are_tokenised_in_smaller_groups(run, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i} " * 20}, {"role": "assistant", "content": "Yo"}]} for i in range(100)]
    whole = run(rows, tokenizer=tokenizer)
    monkeypatch.setattr(module, "_GROUP_CHARS", 100)
    assert run(rows, tokenizer=tokenizer, dataset_id="e").content_hash == whole.content_hash


def test_our_own_fault_fails_the_dataset_with_the_place(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "source_id", lambda row, line: 1 / 0)
    status = run([{"input_ids": [1]}])
    assert status.error is not None and status.error["code"] == "internal"
    assert "near line 1: ZeroDivisionError" in status.error["message"]


@pytest.mark.parametrize("template", ["CHATML", "CHATML_MARKED", "THINKING"])
def test_the_example_data_is_good_to_the_last_row(run, tmp_path: Path, template: str) -> None:
    status = run(EXAMPLES, tokenizer=made.make_tokenizer(tmp_path / "tokenizer", getattr(made, template)))
    assert (status.state, status.rejected, status.errors) == ("ready", 0, {})
    assert status.rows >= 80


def test_the_line_in_the_examples_readme_makes_messages_of_questions(run, tmp_path: Path, tokenizer: str) -> None:
    (line,) = [x for x in EXAMPLES.with_name("README.md").read_text().splitlines() if x.startswith("python3 -c")]
    command = line.replace("../shared/data/gsm8k_train.jsonl", "questions.jsonl")
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "2+2?", "answer": "4"}) + "\n")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL)
    assert run(tmp_path / "gsm8k_messages.jsonl", tokenizer=tokenizer).accepted == 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data is not beside the project")
def test_real_sharegpt_data_is_taken_as_it_is(run, tmp_path: Path, tokenizer: str) -> None:
    status = run(SHARED / "sharegpt_multiturn.json", tokenizer=tokenizer)
    assert status.state == "ready"
    assert status.rows == 500
    assert status.accepted + status.rejected == 500
    assert status.accepted > 450
