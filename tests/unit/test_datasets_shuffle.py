"""The computed permutation, and datasets merged and shuffled by it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statetap.contracts.layout import ROWS, TEMP_PREFIX
from statetap.contracts.records import DatasetSpec, DatasetStatus
from statetap.datasets.ingest import Limits, StoppedError, ingest
from statetap.datasets.permutation import Permutation
from statetap.datasets.shuffle import shuffled
from statetap.store.rows import Row, RowsFile
from tests.support.jobs import write_rows


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 4095, 4097, 65_537, 1_000_003])
def test_it_is_a_bijection_and_its_inverse_undoes_it(n: int) -> None:
    permutation = Permutation(n, seed=7)
    image = permutation.forward(np.arange(n))
    assert image.dtype == np.int64 and (np.bincount(image, minlength=n) == 1).all()
    assert (permutation.backward(image) == np.arange(n)).all()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 1 << 62), seed=st.integers(0, 1 << 70), data=st.data())
def test_it_holds_for_any_size_and_seed(n: int, seed: int, data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    permutation = Permutation(n, seed)
    image = permutation.forward(some)
    assert ((image >= 0) & (image < n)).all() and len({*image.tolist()}) == len(some)
    assert permutation.backward(image).tolist() == some
    assert int(permutation.forward(some[0])) == image[0], "one alone as among others"


def test_it_is_the_same_on_every_machine_and_in_every_process() -> None:
    """Written down once: a change of these numbers would shuffle every dataset anew under its old id."""
    assert Permutation(10, 0).forward(np.arange(10)).tolist() == TEN
    assert Permutation(1_000_000_007, 42).forward([0, 1, 2, 999_999_999]).tolist() == BILLION
    code = "from statetap.datasets.permutation import Permutation as P; print(P(1000, 3).forward(range(1000)).tolist())"
    others = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert others == {f"{Permutation(1000, 3).forward(np.arange(1000)).tolist()}\n"}


TEN = [9, 3, 5, 2, 0, 8, 4, 7, 6, 1]
BILLION = [886901579, 280004089, 224680685, 286268643]


def test_seeds_differ_and_no_place_is_preferred() -> None:
    orders = {tuple(Permutation(20, seed).forward(np.arange(20)).tolist()) for seed in range(500)}
    assert len(orders) == 500 and tuple(range(20)) not in orders
    n, seeds = 16, 3200
    counts = np.zeros((n, n))
    for seed in range(seeds):
        counts[np.arange(n), Permutation(n, seed).forward(np.arange(n))] += 1
    # 256 cells of 200 expected: the sum of squares is chi-squared with 225 degrees of freedom, whose 1 - 1e-9 quantile is 377.
    chi = ((counts - seeds / n) ** 2 / (seeds / n)).sum()
    assert chi < 377
    big = Permutation(100_000, 1).forward(np.arange(100_000))
    assert abs(np.corrcoef(np.arange(100_000), big)[0, 1]) < 0.02
    assert (np.diff(big) == 1).sum() < 20, "neighbours do not stay neighbours"


def test_what_lies_outside_is_refused() -> None:
    for wrong in (-1, 10, [0, 10]):
        with pytest.raises(IndexError):
            Permutation(10, 1).forward(wrong)
    assert Permutation(10, 1).forward([]).tolist() == []


def test_rows_move_whole(tmp_path: Path) -> None:
    n = 1000
    write_rows(tmp_path / ROWS, ([n_ % 50 + 1] * (n_ % 9) for n_ in range(n)), errors={5: "bad_row"})
    before = RowsFile(tmp_path / ROWS)
    want = [_plain(r) for r in before.read(0, n)]
    permutation = Permutation(n, 11)
    batches = list(shuffled(tmp_path / ROWS, permutation))
    assert [len(b) for b in batches] == [64] * 15 + [40]
    got = [tuple(row[name] for name in NAMES) for b in batches for row in b.to_pylist()]
    assert got == [want[int(i)] for i in permutation.forward(np.arange(n))]


NAMES = ("input_ids", "loss_mask", "source_id", "line", "error_code", "error_message", "source")


def _plain(row: Row) -> tuple[Any, ...]:
    return (row.input_ids.tolist(), row.loss_mask.tolist(), *(getattr(row, name) for name in NAMES[2:]))


# datasets


def lines(path: Path, rows: list[dict[str, Any] | str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def made(store: Path, sources: list[str], seed: int | None = None, **more: Any) -> tuple[DatasetStatus, list[Row]]:
    name = f"d{sum(1 for _ in store.glob('datasets/*'))}"
    spec = DatasetSpec(dataset_id=name, name="n", path="", sources=sources, shuffle_seed=seed, **more)
    status = ingest(spec, store, lambda s: None)
    folder = store / "datasets" / name
    assert [p.name for p in folder.iterdir() if p.name.startswith(TEMP_PREFIX)] == []
    if status.state != "ready":
        return status, []
    file = RowsFile(folder / ROWS)
    return status, list(file.read(0, file.rows))


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """100 + 50 + 30 rows; each id says where the row stands; two bad ones."""

    def rows(at: int, n: int) -> list[dict[str, Any] | str]:
        return [{"input_ids": [at, i + 1], "id": f"{at}/{i}"} for i in range(n)]

    a, b, c = rows(1, 100), rows(2, 50), rows(3, 30)
    a[40], b[7] = "{", {"input_ids": [-5]}
    (tmp_path / "c.json").write_text(json.dumps(c))
    return [lines(tmp_path / "x" / "train.jsonl", a), lines(tmp_path / "y" / "train.jsonl", b), str(tmp_path / "c.json")]


def test_sources_are_merged_in_order_and_every_row_knows_its_file_and_line(tmp_path: Path, three: list[str]) -> None:
    status, rows = made(tmp_path, three)
    assert (status.rows, status.accepted, status.errors) == (180, 178, {"bad_row": 1, "bad_token_id": 1})
    assert status.bytes_read == status.bytes_total == sum(Path(p).stat().st_size for p in three)
    assert [(r.source, r.line) for r in rows] == [(0, i + 1) for i in range(100)] + [(1, i + 1) for i in range(50)] + [
        (2, i + 1) for i in range(30)
    ]
    assert all(r.error_code or r.input_ids.tolist() == [r.source + 1, r.line] for r in rows)
    assert [(e["row"], e["line"], e["message"].partition(": ")[0]) for e in status.examples] == [
        (40, 41, "x/train.jsonl:41"),
        (107, 8, "y/train.jsonl:8"),
    ]
    assert rows[40].error_message == status.examples[0]["message"]
    assert (rows[40].source_id, rows[41].source_id, rows[107].source_id) == ("x/train.jsonl:41", "1/41", "y/train.jsonl:8")


def test_a_seed_permutes_all_rows_and_another_seed_otherwise(tmp_path: Path, three: list[str]) -> None:
    plain, rows = made(tmp_path, three)
    status, got = made(tmp_path, three, seed=5)
    again, _ = made(tmp_path, three, seed=5)
    other, _ = made(tmp_path, three, seed=6)
    order = Permutation(180, 5).forward(np.arange(180)).tolist()
    assert [_plain(r) for r in got] == [_plain(rows[i]) for i in order]
    assert (status.tokens, status.errors, status.max_tokens) == (plain.tokens, plain.errors, plain.max_tokens)
    assert status.content_hash == again.content_hash
    assert len({plain.content_hash, status.content_hash, other.content_hash}) == 3
    assert sorted(e["row"] for e in status.examples) == [e["row"] for e in status.examples] == sorted([order.index(40), order.index(107)])
    for e in status.examples:
        assert got[e["row"]].error_message == e["message"]


def test_the_hash_is_that_of_the_rows_however_they_came(tmp_path: Path, three: list[str]) -> None:
    """The rule: equal ids and masks in equal order, equal hash."""
    status, rows = made(tmp_path, three, seed=5)
    one = lines(tmp_path / "one.jsonl", [{"input_ids": r.input_ids.tolist()} if not r.error_code else "{" for r in rows])
    assert made(tmp_path, [one])[0].content_hash == status.content_hash
    single = ingest(DatasetSpec(dataset_id="single", name="n", path=one), tmp_path, lambda s: None)
    assert single.content_hash == status.content_hash


def test_each_source_has_its_own_kind(tmp_path: Path) -> None:
    tokens = lines(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}])
    turns = lines(tmp_path / "b.jsonl", [{"conversations": [{"from": "human", "value": "x"}]}])
    status, _ = made(tmp_path, [tokens, turns])
    assert (status.rows, status.accepted, status.errors) == (2, 1, {"no_supervised_token": 1})
    assert made(tmp_path, [tokens, turns], format="tokenized")[0].errors == {"bad_row": 1}


def test_the_same_file_twice_and_a_missing_one(tmp_path: Path, three: list[str]) -> None:
    status, rows = made(tmp_path, [three[2], three[2]])
    assert status.rows == 60 and Counter(r.source for r in rows) == {0: 30, 1: 30}
    status, _ = made(tmp_path, [three[0], str(tmp_path / "none.jsonl")])
    assert status.error is not None and status.error["code"] == "dataset_failed" and "none.jsonl" in status.error["message"]
    empty = lines(tmp_path / "empty.jsonl", [])
    status, _ = made(tmp_path, [empty, empty], seed=1)
    assert status.error is not None and "no rows" in status.error["message"]


def test_one_file_can_be_shuffled_too(tmp_path: Path, three: list[str]) -> None:
    spec = DatasetSpec(dataset_id="s", name="n", path=three[0], shuffle_seed=3)
    status = ingest(spec, tmp_path, lambda s: None)
    file = RowsFile(tmp_path / "datasets/s" / ROWS)
    assert [r.line - 1 for r in file.read(0, 100)] == Permutation(100, 3).forward(np.arange(100)).tolist()
    assert status.examples[0]["message"].startswith("line 41: ")


def test_a_stop_in_the_second_pass_leaves_nothing(tmp_path: Path, three: list[str]) -> None:
    asked = []
    spec = DatasetSpec(dataset_id="s", name="n", path="", sources=three, shuffle_seed=3)
    with pytest.raises(StoppedError):
        ingest(spec, tmp_path, lambda s: None, lambda: len(asked.append(0) or asked) > 4)  # type: ignore[func-returns-value]
    assert list((tmp_path / "datasets/s").iterdir()) == []
    assert ingest(spec, tmp_path, lambda s: None).rows == 180


def test_labels_tell_sources_apart_with_as_little_as_that_takes() -> None:
    paths = ["/d/a/x.jsonl", "/d/b/x.jsonl", "/d/y.jsonl", "/d/b/x.jsonl", "/e/a/x.jsonl"]
    spec = DatasetSpec(dataset_id="d", name="n", path="", sources=paths)
    assert spec.labels == ["d/a/x.jsonl", "b/x.jsonl", "y.jsonl", "b/x.jsonl", "e/a/x.jsonl"]
    assert spec.place(2, 7) == "y.jsonl:7"
    assert DatasetSpec(dataset_id="d", name="n", path="/d/x").place(0, 3, "element") == "element 3"
    many = DatasetSpec(dataset_id="d", name="n", path="", sources=[f"/data/{i}/part.jsonl" for i in range(1000)])
    assert many.labels[999] == "999/part.jsonl"


def test_a_row_of_too_many_tokens_is_left_out(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"input_ids": [1] * n} for n in (3, 9, 5)])
    spec = DatasetSpec(dataset_id="d", name="n", path=path)
    status = ingest(spec, tmp_path, lambda s: None, limits=Limits(row_tokens=5))
    assert (status.accepted, status.errors) == (2, {"prompt_too_long": 1})
    assert "STATETAP_MAX_ROW_TOKENS" in status.examples[0]["message"]
    cut = DatasetSpec(dataset_id="e", name="n", path=path, max_length=4, truncate=True)
    assert ingest(cut, tmp_path, lambda s: None, limits=Limits(row_tokens=5)).accepted == 3
