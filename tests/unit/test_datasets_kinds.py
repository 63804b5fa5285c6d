"""Rows of every kind, good and bad."""

import numpy as np
import pytest

from statetap.contracts.errors import ErrorCode, RowError
from statetap.datasets.kinds import Conversation, Tokens, detect, parse, source_id

USER = {"role": "user", "content": "Hi"}
BOT = {"role": "assistant", "content": "Hello"}


def test_the_kind_is_told_by_the_keys() -> None:
    assert detect({"input_ids": [1]}) == "tokenized"
    assert detect({"messages": []}) == "messages"
    assert detect({"id": 1, "conversations": []}) == "sharegpt"
    with pytest.raises(RowError, match="'question', 'answer'"):
        detect({"question": "?", "answer": "!"})


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"id": "a"}, "a"),
        ({"id": 0}, "0"),
        ({"conversation_id": "c"}, "c"),
        ({"id": None}, "7"),
        ({"id": ""}, "7"),
        ({"id": True}, "7"),
        ({"id": [1]}, "7"),
        ({}, "7"),
    ],
)
def test_a_row_is_named_by_its_id_or_its_line(row: dict, want: str) -> None:
    assert source_id(row, "7") == want


def test_tokenised_rows_keep_ids_and_mask() -> None:
    row = parse("tokenized", {"input_ids": [5, 0, 2**31 - 1], "loss_mask": [0, True, 1]}, None)
    assert isinstance(row, Tokens)
    assert row.input_ids.tolist() == [5, 0, 2**31 - 1]
    assert (row.input_ids.dtype, row.loss_mask.dtype) == (np.int32, np.uint8)
    assert row.loss_mask.tolist() == [0, 1, 1]
    assert parse("tokenized", {"input_ids": [5, 6]}, 7).loss_mask.tolist() == [1, 1]
    assert parse("tokenized", {"input_ids": [5, 6], "loss_mask": None}, 7).loss_mask.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ({"input_ids": []}, "empty_prompt", "empty"),
        ({"input_ids": "1 2"}, "bad_row", "a string, not an array"),
        ({"input_ids": None}, "bad_row", "null, not an array"),
        ({"input_ids": [1, -1]}, "bad_token_id", r"input_ids\[1\] is -1, outside \[0, 100\)"),
        ({"input_ids": [1, 100]}, "bad_token_id", r"input_ids\[1\] is 100"),
        ({"input_ids": [1, 2**40]}, "bad_token_id", r"input_ids\[1\] is 1099511627776"),
        ({"input_ids": [1, 2.0]}, "bad_token_id", r"input_ids\[1\] is a float"),
        ({"input_ids": [1, True]}, "bad_token_id", r"input_ids\[1\] is a boolean"),
        ({"input_ids": [1, None]}, "bad_token_id", r"input_ids\[1\] is null"),
        ({"input_ids": [1, float("nan")]}, "bad_token_id", r"input_ids\[1\] is a float"),
        ({"input_ids": [[1, 2]]}, "bad_token_id", r"input_ids\[0\] is an array"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_row", "has 1 values, input_ids has 2"),
        ({"input_ids": [1, 2], "loss_mask": "11"}, "bad_row", "a string"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_row", r"loss_mask\[1\] is 2"),
        ({"input_ids": [1, 2], "loss_mask": [1, -1]}, "bad_row", r"loss_mask\[1\] is -1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1.0]}, "bad_row", r"loss_mask\[1\] is 1.0"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "no_supervised_token", "0 everywhere"),
        ({"messages": [USER, BOT]}, "bad_row", "no 'input_ids'"),
    ],
)
def test_a_bad_tokenised_row_says_what_and_where(row: dict, code: str, message: str) -> None:
    with pytest.raises(RowError, match=message) as e:
        parse("tokenized", row, 100)
    assert e.value.code.value == code


def test_without_a_vocabulary_ids_are_bounded_by_int32() -> None:
    with pytest.raises(RowError, match="outside"):
        parse("tokenized", {"input_ids": [2**31]}, None)


def test_both_spellings_of_a_conversation_are_the_same() -> None:
    sharegpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    specforge = {"conversations": [USER, BOT]}
    assert parse("sharegpt", sharegpt, None) == parse("sharegpt", specforge, None) == parse("messages", {"messages": [USER, BOT]}, None)


def test_text_parts_are_joined_and_tool_turns_may_be_without_text() -> None:
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A"}, {"text": "B"}]},
            {"role": "assistant", "content": None, "tool_calls": call, "name": None},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
        ],
        "tools": tools,
    }
    got = parse("messages", row, None)
    assert isinstance(got, Conversation)
    assert got.tools == tools
    assert got.messages == [
        {"role": "user", "content": "AB"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("messages", "code", "message"),
    [
        ([], "empty_prompt", "messages is empty"),
        ("Hi", "bad_row", "messages is a string"),
        ([USER, "Hello"], "bad_row", r"messages\[1\] is a string, not an object"),
        ([USER, {"role": "narrator", "content": "…"}], "bad_row", r"messages\[1\] has the role 'narrator'"),
        ([USER, {"content": "…"}], "bad_row", r"messages\[1\] has the role None"),
        ([USER, {"role": ["user"], "content": "…"}], "bad_row", r"messages\[1\] has the role"),
        ([USER, {"role": "assistant"}], "bad_row", r"messages\[1\].content is null"),
        ([USER, {"role": "assistant", "content": None}], "bad_row", r"messages\[1\].content is null"),
        ([USER, {"role": "assistant", "content": 4}], "bad_row", r"messages\[1\].content is an integer"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}, BOT], "bad_row", r"messages\[0\].content has a part"),
        ([{"role": "user", "content": [{"type": "text"}]}, BOT], "bad_row", r"messages\[0\].content has a part"),
        ([USER], "no_supervised_token", "no assistant turn"),
    ],
)
def test_a_bad_conversation_says_what_and_where(messages: object, code: str, message: str) -> None:
    with pytest.raises(RowError, match=message) as e:
        parse("messages", {"messages": messages}, None)
    assert e.value.code == ErrorCode(code)


def test_tools_have_to_be_objects() -> None:
    with pytest.raises(RowError, match="tools"):
        parse("messages", {"messages": [USER, BOT], "tools": "search"}, None)
