"""The checks of a row's states: each kind of damage has its own code and names its place."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from statetap.contracts.errors import ErrorCode, RowError
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.sample_format import CHUNK
from statetap.contracts.tensors import AUX, BLOCK, tap_header
from statetap.store.check import check_ids, check_states, check_tap_header
from tests.support.jobs import StateMaker, profile

WORD = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}
SIGN = {"BF16": 0x8000, "F16": 0x8000, "F32": 0x80000000}
LARGEST = {"BF16": 0x7F7F, "F16": 0x7BFF, "F32": 0x7F7FFFFF}
IDS = np.arange(1, 41, dtype=np.int32)


def states(p: CaptureProfile, ids: np.ndarray = IDS) -> np.ndarray:
    return np.frombuffer(b"".join(StateMaker(p).states(ids)), WORD[p.dtype]).copy()


def check(p: CaptureProfile, words: np.ndarray, tokens: int = len(IDS)) -> None:
    check_states(p, tokens, np.concatenate([np.zeros(BLOCK, np.uint8), words.view(np.uint8)]))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("final", ["pre", "both", "none"])
def test_good_states_pass_and_every_byte_is_hashed_in_order(dtype: str, final: str) -> None:
    p = profile(dtype=dtype, final=final, hidden=1024)
    ids = np.arange(1, 200, dtype=np.int32)
    payload = states(p, ids).view(np.uint8)
    assert len(payload) > CHUNK  # several blocks
    digest = xxhash.xxh3_64()
    check_states(p, len(ids), np.concatenate([np.zeros(BLOCK, np.uint8), payload]), digest.update)
    assert digest.hexdigest() == xxhash.xxh3_64_hexdigest(payload.data)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_value_that_is_not_finite_is_named_by_boundary_and_token(dtype: str, negative: bool, kind: str) -> None:
    p = profile(dtype=dtype)
    words = states(p)
    bits = NAN[dtype] if kind == "nan" else LARGEST[dtype] + 1
    # Token 17, second of three boundaries, column 5: rows of aux are token-major.
    words.reshape(-1, p.hidden)[17 * 3 + 1, 5] = bits | (SIGN[dtype] if negative else 0)
    with pytest.raises(RowError, match="boundary 4: token 17") as e:
        check(p, words)
    assert e.value.code is ErrorCode.NONFINITE_STATES


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_largest_finite_values_and_subnormals_pass(dtype: str) -> None:
    p = profile(dtype=dtype)
    words = states(p)
    rows = words.reshape(-1, p.hidden)
    rows[3] = 0
    rows[3, 1] = 1  # the smallest subnormal, behind a zero in the first column
    rows[4] = LARGEST[dtype]
    rows[5] = LARGEST[dtype] | SIGN[dtype]
    check(p, words)


@pytest.mark.parametrize("negative_zero", [False, True])
def test_an_all_zero_row_is_named(negative_zero: bool) -> None:
    p = profile()
    words = states(p)
    words.reshape(-1, p.hidden)[39 * 3 + 2] = SIGN["BF16"] if negative_zero else 0
    with pytest.raises(RowError, match="boundary 5: all 64 values of token 39") as e:
        check(p, words)
    assert e.value.code is ErrorCode.ZERO_STATES


def test_a_zero_row_of_the_final_states_is_named() -> None:
    p = profile()
    words = states(p)
    words.reshape(-1, p.hidden)[len(IDS) * 3 + 7] = 0
    with pytest.raises(RowError, match="final_hidden_states_prenorm: all 64 values of token 7"):
        check(p, words)


def test_rows_may_be_zero_at_boundary_0_but_not_the_whole_plane() -> None:
    p = profile(boundaries=(0, 4))
    words = states(p)
    aux = words[: len(IDS) * 2 * p.hidden].reshape(len(IDS), 2, p.hidden)
    aux[1:, 0] = 0
    check(p, words)
    aux[0, 0] = 0
    with pytest.raises(RowError, match="boundary 0: all 40 tokens") as e:
        check(p, words)
    assert e.value.code is ErrorCode.ZERO_STATES


def tap(p: CaptureProfile, ids: np.ndarray = IDS) -> np.ndarray:
    return np.frombuffer(StateMaker(p).tap_file(ids), np.uint8).copy()


def check_tap(p: CaptureProfile, data: np.ndarray, ids: np.ndarray = IDS) -> None:
    want = tap_header(p, len(ids))
    check_tap_header(want, bytes(data[:BLOCK]), len(data))
    check_ids(ids, data[want.tensors["input_ids"].start :])


def test_a_right_tap_file_passes() -> None:
    check_tap(profile(), tap(profile()))


def test_other_token_ids_are_named_by_the_first_position() -> None:
    other = IDS.copy()
    other[5] = 9_999
    with pytest.raises(RowError, match="position 5 is token 9999, not 6") as e:
        check_tap(profile(), tap(profile(), other))
    assert e.value.code is ErrorCode.TOKEN_MISMATCH


@pytest.mark.parametrize(
    "other", [profile(hidden=128), profile(dtype="F16"), profile(boundaries=(2, 4)), profile(final="both"), profile(boundaries=(2, 4, 6))]
)
def test_a_tap_file_of_another_profile_is_a_shape_mismatch(other: CaptureProfile) -> None:
    with pytest.raises(RowError) as e:
        check_tap(profile(), tap(other))
    assert e.value.code is ErrorCode.SHAPE_MISMATCH


def test_too_few_rows_a_cut_file_and_no_header_are_shape_mismatches() -> None:
    p = profile()
    for data in (tap(p, IDS[:-1]), tap(p)[:-1], np.zeros(BLOCK * 2, np.uint8)):
        with pytest.raises(RowError) as e:
            check_tap(p, data)
        assert e.value.code is ErrorCode.SHAPE_MISMATCH
    with pytest.raises(RowError, match=AUX):
        check_tap(p, tap(p, IDS[:-1]))


def test_ids_that_are_equal_pass() -> None:
    check_ids(IDS, IDS.copy().view(np.uint8))
