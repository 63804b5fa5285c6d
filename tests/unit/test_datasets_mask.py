"""The loss mask: exactly what the assistant wrote, or no row at all."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from statetap.contracts.errors import ErrorCode, RequestError, RowError
from statetap.datasets.kinds import Conversation, Tokens
from statetap.datasets.mask import Masker, _mask_by_offsets
from tests.support import made_tokenizer as made

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+2? 日本語 🙂"},
    {"role": "assistant", "content": "It is 4. 🙂"},
    {"role": "user", "content": "It is 4. 🙂"},
    {"role": "assistant", "content": "Yes, it is:\n\n  4  "},
]


def conversation(*turns: dict[str, str]) -> Conversation:
    return Conversation(messages=list(turns or TURNS))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory):
    def make(template: str | None, *, kind: str = "fast") -> Masker:
        folder = tmp_path_factory.mktemp("tokenizer")
        if kind == "fast":
            return Masker(made.make_tokenizer(folder, template))
        maker = {"slow": made.make_slow_tokenizer, "tiktoken": made.make_tiktoken_tokenizer}[kind]
        return Masker(maker(folder, template or ""), trust_remote_code=kind == "tiktoken")

    return make


def supervised(masker: Masker, tokens: Tokens | RowError) -> list[str]:
    """The texts of the runs of supervised tokens."""
    assert isinstance(tokens, Tokens), tokens
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.loss_mask, [0]])))
    return [masker._tokenizer.decode(tokens.input_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("kind", ["fast", "slow", "tiktoken"])
@pytest.mark.parametrize("template", ["CHATML", "CHATML_MARKED"])
def test_answers_and_their_end_of_turn_are_supervised_and_nothing_else(load, template: str, kind: str) -> None:
    masker = load(getattr(made, template), kind=kind)
    (tokens,) = masker.encode([conversation()])
    newline = "" if template == "CHATML_MARKED" else "\n"
    assert supervised(masker, tokens) == [f"It is 4. 🙂<|im_end|>{newline}", f"Yes, it is:\n\n  4  <|im_end|>{newline}"]


def test_the_ids_are_those_of_the_whole_rendering(load, tmp_path: Path) -> None:
    masker = load(made.CHATML)
    (tokens,) = masker.encode([conversation()])
    want = masker._tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert tokens.input_ids.tolist() == want
    assert tokens.input_ids.dtype == np.int32
    assert tokens.loss_mask.dtype == np.uint8


def test_a_marked_template_agrees_with_transformers_own_mask_where_that_is_right(load) -> None:
    masker = load(made.CHATML_MARKED)
    turns = [
        {"role": r, "content": c}
        for r, c in [("user", "Hello"), ("assistant", "Here is the answer."), ("user", "So"), ("assistant", "Sure!")]
    ]
    (tokens,) = masker.encode([conversation(*turns)])
    out = masker._tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens.loss_mask.tolist() == out["assistant_masks"]


def test_a_template_that_drops_earlier_thoughts_never_supervises_the_user(load) -> None:
    masker = load(made.THINKING)
    turns = [dict(t) for t in TURNS]
    turns[2]["content"] = "<think>\nhm, 2+2\n</think>\n\nIt is 4. 🙂"
    (tokens,) = masker.encode([conversation(*turns)])
    assert supervised(masker, tokens) == ["It is 4. 🙂<|im_end|>\n", "<think>\n\n</think>\n\nYes, it is:\n\n  4  <|im_end|>\n"]


@pytest.mark.parametrize("template", ["OPENS_THINK", "SHORTENS"])
def test_renderings_that_are_no_prefixes_are_ambiguous(load, template: str) -> None:
    (error,) = load(getattr(made, template)).encode([conversation()])
    assert isinstance(error, RowError)
    assert error.code is ErrorCode.MASK_AMBIGUOUS
    assert "turn 2" in error.message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (made.CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}", "marks nothing"),
        ("{% generation %}" + made.CHATML + "{% endgeneration %}", "marks the whole"),
    ],
)
def test_a_mark_around_nothing_or_everything_is_ambiguous(load, template: str, message: str) -> None:
    (error,) = load(template).encode([conversation()])
    assert isinstance(error, RowError) and error.code is ErrorCode.MASK_AMBIGUOUS
    assert message in error.message


def test_one_bad_conversation_does_not_touch_its_neighbours(load) -> None:
    masker = load(made.REFUSES_SYSTEM)
    good = conversation(*TURNS[1:])
    first, error, last = masker.encode([good, conversation(), good])
    assert isinstance(error, RowError) and error.code is ErrorCode.BAD_ROW
    assert "System role not supported" in error.message
    assert len(supervised(masker, first)) == 2
    np.testing.assert_array_equal(first.input_ids, last.input_ids)


def test_a_leading_assistant_turn_is_context(load) -> None:
    masker = load(made.CHATML)
    lead = {"role": "assistant", "content": "Welcome."}
    tokens, error = masker.encode([conversation(lead, *TURNS[1:]), conversation(lead)])
    assert len(supervised(masker, tokens)) == 2
    assert isinstance(error, RowError) and error.code is ErrorCode.NO_SUPERVISED_TOKEN


def test_a_conversation_that_ends_with_the_user_keeps_its_answers(load) -> None:
    masker = load(made.CHATML)
    (tokens,) = masker.encode([conversation(*TURNS[:4])])
    assert supervised(masker, tokens) == ["It is 4. 🙂<|im_end|>\n"]


def test_a_token_over_the_edge_of_a_turn_is_left_out() -> None:
    offsets = [(0, 3), (3, 6), (6, 7), (6, 7), (7, 10), (10, 12)]
    assert _mask_by_offsets(offsets, [(3, 10)]).tolist() == [0, 1, 1, 1, 1, 0]
    assert _mask_by_offsets(offsets, [(4, 9)]).tolist() == [0, 0, 1, 1, 0, 0]
    assert _mask_by_offsets(offsets, [(4, 5)]).tolist() == [0] * 6


def test_without_offsets_a_token_over_the_edge_is_ambiguous(load) -> None:
    masker = load(made.CHATML)
    text = "the quick brown fox"
    ids = masker._tokenizer(text, add_special_tokens=False)["input_ids"]
    assert masker._mask_by_prefixes(text, ids, [(0, len(text))]).all()
    with pytest.raises(RowError, match="spans the edge"):
        masker._mask_by_prefixes(text, ids, [(0, text.index("ick") + 1)])


def test_a_tokenizer_that_is_none_says_so(tmp_path: Path, load) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for name in (str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(RequestError, match="cannot be loaded") as e:
            Masker(name)
        assert e.value.code is ErrorCode.DATASET_FAILED
    with pytest.raises(RequestError, match="no chat template"):
        load(None).require_template()


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    name = made.make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(name)
    assert Masker(name).vocab_size == len(tokenizer) == max(tokenizer.get_vocab().values()) + 1
