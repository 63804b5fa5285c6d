"""Source files, with everything that is wrong in real ones."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statetap.contracts.errors import ErrorCode, RequestError, RowError
from statetap.datasets import formats
from statetap.datasets.formats import Source


def read(path: Path, **limits: int) -> list[tuple[int, dict | str]]:
    """(line, row) of a file; a bad row is its message."""
    with Source(path, **limits) as source:
        return [(line, str(v.message) if isinstance(v, RowError) else v) for line, v in source]


def read_bytes(folder: Path, data: bytes, **limits: int) -> list[tuple[int, dict | str]]:
    path = folder / "source"
    path.write_bytes(data)
    return read(path, **limits)


def test_lines_keep_their_numbers_over_empty_ones_crlf_and_a_bom(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a":1}\r\n\r\n  \t\n{"a":2}\n\n{"a":3}'
    assert read_bytes(tmp_path, data) == [(1, {"a": 1}), (4, {"a": 2}), (6, {"a": 3})]


def test_a_file_that_begins_with_empty_lines_is_still_counted_rightly(tmp_path: Path) -> None:
    assert read_bytes(tmp_path, b"\n\n \n\n\n" + b'{"a":1}\n{"a":2}') == [(6, {"a": 1}), (7, {"a": 2})]
    assert read_bytes(tmp_path, b'\n\n \n\n\n\n\n[{"a":1}]') == [(1, {"a": 1})]
    assert read_bytes(tmp_path, b"\n" * 3_000_000 + b'{"a":1}') == [(3_000_001, {"a": 1})]


@pytest.mark.parametrize("data", [b"", b"\n\n  \r\n", b"\xef\xbb\xbf", b"[]", b" [ \n ] \n"])
def test_a_file_without_rows_gives_none(tmp_path: Path, data: bytes) -> None:
    assert read_bytes(tmp_path, data) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "not JSON"),
        (b"\x00\x00\x00", "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8"),
        (b'{"a": "\\ud800"}', "a lone surrogate"),
        (b"[1, 2]", "an array where an object is wanted"),
        (b'"text"', "a string where an object is wanted"),
        (b"17", "a number where an object is wanted"),
        (b"null", "null where an object is wanted"),
        (b'{"a":' * 5000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_the_next_goes_on(tmp_path: Path, line: bytes, message: str) -> None:
    (first, bad, last) = read_bytes(tmp_path, b'{"a":0}\n' + line + b'\n{"a":2}\n')
    assert first == (1, {"a": 0})
    assert last == (3, {"a": 2})
    assert bad[0] == 2
    assert isinstance(bad[1], str) and message in bad[1]


def test_nan_and_infinity_as_python_writes_them_are_taken(tmp_path: Path) -> None:
    row = {"score": float("inf"), "messages": []}
    assert read_bytes(tmp_path, json.dumps(row).encode()) == [(1, row)]


def test_one_giant_line_is_a_bad_row_and_its_rest_is_skipped(tmp_path: Path) -> None:
    giant, long = b'{"a": "' + b"x" * (3 << 20) + b'"}', "longer than 1048576 bytes (STATETAP_MAX_ROW_BYTES)"
    want = [(1, {"a": 1}), (2, long), (3, {"a": 3}), (4, long)]
    assert read_bytes(tmp_path, b'{"a":1}\n' + giant + b'\n{"a":3}\n' + giant, max_row_bytes=1 << 20) == want
    assert read_bytes(tmp_path, b'[{"a":1},' + giant + b',{"a":3},' + giant + b"]", max_row_bytes=1 << 20) == want
    assert [type(row) for _, row in read_bytes(tmp_path, giant)] == [dict], "the default takes it"


def test_an_array_is_streamed_over_every_cut_of_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": 'x"],}\\', "b": [[1, {"c": "\\\\"}], 2]}, {"ü": "日本\n\t[{"}, {}, {"d": {"e": [[], {}]}}]
    text = json.dumps(rows, indent=1).encode() + b"\n"
    for chunk in (1, 2, 3, 5, 7, 1 << 20):
        monkeypatch.setattr(formats, "_CHUNK", chunk)
        assert read_bytes(tmp_path, text) == list(enumerate(rows, 1))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), st.recursive(st.text(max_size=6), lambda x: st.lists(x, max_size=3)), max_size=3)),
    compact=st.booleans(),
    ascii_only=st.booleans(),
)
def test_an_array_gives_the_rows_that_json_gives(
    tmp_path_factory: pytest.TempPathFactory, rows: list, compact: bool, ascii_only: bool
) -> None:
    text = json.dumps(rows, separators=(",", ":") if compact else None, ensure_ascii=ascii_only)
    folder = tmp_path_factory.mktemp("array")
    assert read_bytes(folder, text.encode("utf-8", "replace")) == list(enumerate(json.loads(text.encode("utf-8", "replace")), 1))


def test_a_bad_element_is_that_elements_alone(tmp_path: Path) -> None:
    got = read_bytes(tmp_path, b'[{"a":1}, 7, "x,]", null, {"a":tru}, , {"a":NaN], {"b":2},]')
    assert [line for line, _ in got] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert got[0] == (1, {"a": 1})
    assert got[7] == (8, {"b": 2})
    assert all(isinstance(v, str) for _, v in got[1:7])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'[{"a":1},{"a":', "breaks off in or after element 2"),
        (b'[{"a":1},{"a":"x', "breaks off in or after element 2"),
        (b'[{"a":1}', "breaks off in or after element 1"),
        (b'[{"a":1}]\n[{"a":2}]', "text after the end"),
        (b'[{"a":1}}]', "without its"),
    ],
)
def test_an_array_that_breaks_off_never_passes_for_a_shorter_one(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as e:
        read_bytes(tmp_path, text)
    assert e.value.code is ErrorCode.DATASET_FAILED


def test_compressed_files_are_told_by_their_content(tmp_path: Path) -> None:
    text = b"".join(b'{"a":%d}\n' % i for i in range(1000))
    want = [(i + 1, {"a": i}) for i in range(1000)]
    assert read_bytes(tmp_path, gzip.compress(text[:500]) + gzip.compress(text[500:])) == want
    with pa.CompressedOutputStream(tmp_path / "rows.zst", "zstd") as f:
        f.write(text)
    assert read(tmp_path / "rows.zst") == want


def test_a_cut_gzip_file_fails_after_the_rows_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"a":%d}\n' % (i * 7919 % 1000) for i in range(5000)))[:-40])
    with pytest.raises(RequestError, match="cannot be read to its end"):
        read(path)


def test_what_is_no_readable_file_is_refused_at_once(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "utf16").write_bytes('{"a":1}'.encode("utf-16"))
    for name, message in [("none", "No such file"), ("fifo", "not a regular file"), (".", "not a regular file"), ("utf16", "UTF-16")]:
        with pytest.raises(RequestError, match=message) as e:
            Source(tmp_path / name)
        assert e.value.code is ErrorCode.DATASET_FAILED


def test_progress_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(gzip.compress(b'{"a":1}\n' * 1000))
    with Source(path) as source:
        assert (source.bytes_read, source.bytes_total) == (0, path.stat().st_size)
        assert len(list(source)) == 1000
        assert source.bytes_read == source.bytes_total
