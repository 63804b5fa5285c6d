"""Contracts: headers, profiles, boundaries, rids and error codes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from statetap.contracts import capture, keys, layout, tensors
from statetap.contracts.boundaries import default_boundaries, parse_boundaries
from statetap.contracts.errors import SPECS, ErrorCode, StatetapError
from statetap.contracts.profile import CaptureProfile, NormSpec
from statetap.contracts.records import RowRecord
from statetap.contracts.sample_format import SampleFormat


def profile(**changes: object) -> CaptureProfile:
    base = {
        "model": "m", "revision": "r", "quantization": "none", "boundaries": (1, 3, 5), "final": "both", "dtype": "BF16", "hidden": 8, "num_layers": 6,
        "vocab_size": 100, "max_length": 64, "norm": NormSpec(variant="rmsnorm", eps=1e-6),
    }  # fmt: skip
    return CaptureProfile(**{**base, **changes})


@given(T=st.integers(1, 300), final=st.sampled_from(("pre", "post", "both", "none")), dtype=st.sampled_from(("F32", "BF16", "F16")))
def test_a_header_is_one_block_that_safetensors_reads_and_we_read_back(T: int, final: str, dtype: str) -> None:
    p = profile(final=final, dtype=dtype)
    for header in (
        tensors.tap_header(p, T),
        SampleFormat(p).header(T, T, row=7, source_id="x" * 9000, ids_xxh3="0" * 16, schema_version=1),
    ):
        raw = header.encode()
        assert len(raw) == tensors.BLOCK
        assert tensors.parse_header(raw) == header
        if dtype != "BF16":  # numpy has no bfloat16
            loaded = load(raw + bytes(header.size - len(raw)))
            assert loaded["aux_hidden_states"].shape == (T, 24)
            assert loaded["input_ids"].dtype.name == "int32"
    assert SampleFormat(p).bytes(T) == header.size
    # the states of a tap file and of its sample file lie at the same place: the payload is copied as it is
    tap = tensors.tap_header(p, T)
    assert all(header.tensors[n] == t for n, t in tap.tensors.items())


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 8, b"\xff" * 16, (20).to_bytes(8, "little") + b"[]" + b" " * 18, (4).to_bytes(8, "little") + b"{a:b"]
)
def test_bytes_that_are_no_header_are_refused(raw: bytes) -> None:
    with pytest.raises(StatetapError) as e:
        tensors.parse_header(raw)
    assert e.value.code is ErrorCode.SHAPE_MISMATCH


def test_the_profile_id_covers_what_files_mean_and_not_the_versions() -> None:
    assert profile().profile_id == profile(sglang_version="0.5.24", plugin_version="9").profile_id
    for change in (
        {"boundaries": (3, 1, 5)},
        {"final": "pre"},
        {"dtype": "F16"},
        {"revision": "s"},
        {"max_length": 65},
        {"norm": NormSpec(variant="rmsnorm", eps=1e-5)},
    ):
        assert profile(**change).profile_id != profile().profile_id, change
    assert CaptureProfile.from_dict(json.loads(json.dumps(profile().to_dict()))) == profile()
    assert profile().bytes_per_token == 5 * 8 * 2
    with pytest.raises(StatetapError):
        CaptureProfile.from_dict({"model": "m"})


def test_default_boundaries_are_eagle3s() -> None:
    assert default_boundaries(61) == (2, 30, 58)  # Kimi-K2.5
    assert default_boundaries(32) == (2, 16, 29)  # Llama-3-8B
    assert default_boundaries(6) == (1, 3, 5)  # too few blocks for three different ones


@pytest.mark.parametrize(("text", "words"), [("1,x", "not a list"), ("7", "outside [0, 6]"), ("-1", "outside"), ("2,2", "twice")])
def test_wrong_boundaries_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(StatetapError, match="boundaries") as e:
        parse_boundaries(text, 6)
    assert words in e.value.message


def test_a_rid_names_its_lease_and_nothing_else_asks_for_capture() -> None:
    lease = capture.new_lease()
    rids = {capture.new_rid(lease, row) for row in (0, 17, 10**9)}
    assert {capture.lease_of(r) for r in rids} == {lease}
    assert len({len(r) for r in rids}) == 1  # SGLang's aborts match by prefix
    for other in ("HEALTH_CHECK_1", None, 5, ["st-"], f"st-{lease}", f"../{next(iter(rids))}", next(iter(rids)) + "x"):
        assert capture.lease_of(other) is None


def test_a_row_done_beats_a_failure_of_its_generation_and_a_higher_generation_beats_both() -> None:
    done, failed = RowRecord(row=1, state="done"), RowRecord(row=1, state="failed")
    assert done.rank > failed.rank > RowRecord(row=1, state="skipped").rank
    assert RowRecord(row=1, state="failed", generation=1).rank > done.rank


def test_folders_are_half_open_and_temps_carry_the_attempt() -> None:
    assert layout.sample(1999) == "rows_0-2000/data_1999.safetensors"
    assert layout.sample(2000) == "rows_2000-4000/data_2000.safetensors"
    assert layout.sample(5, 2) == "rows_0-2000/data_5.g2.safetensors"
    assert layout.temp(layout.sample(5), "abc") == "rows_0-2000/.tmp-abc-data_5.safetensors"


def test_every_code_has_its_spec_and_a_next_step() -> None:
    assert set(SPECS) == set(ErrorCode)
    assert all(len(s.next_step) > 10 and 400 <= s.status < 600 for s in SPECS.values())


def test_a_queue_carries_the_schema_version() -> None:
    assert keys.queue("abc") == "statetap:v1:abc"
