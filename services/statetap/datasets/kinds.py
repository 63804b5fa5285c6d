"""Kinds of rows: tokenised ones, ``messages`` and ShareGPT ``conversations``, checked and brought into one form.

Invariant: what leaves here is well-formed (int32 ids and a 0/1 mask of one length, or messages of known roles with text), or is a
RowError that says which field is wrong. Nothing is guessed, dropped or repaired in silence.
"""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..contracts.errors import ErrorCode, RowError

TOKENIZED, MESSAGES, SHAREGPT = "tokenized", "messages", "sharegpt"
KINDS = (TOKENIZED, MESSAGES, SHAREGPT)

_FIELD = {TOKENIZED: "input_ids", MESSAGES: "messages", SHAREGPT: "conversations"}
_ID_FIELDS = ("id", "conversation_id", "source_id", "uuid")
_ROLES = {
    **{r: r for r in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"},
    **{"observation": "tool", "function_response": "tool"},
}


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """``input_ids`` [T] int32 and ``loss_mask`` [T] uint8, 1 where the token is one that the target model writes."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages as chat templates take them, at least one."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def detect(row: dict[str, Any]) -> str:
    """The kind that a row's keys speak for. Raises RowError ``bad_row``."""
    for kind, field in _FIELD.items():
        if field in row:
            return kind
    raise RowError(ErrorCode.BAD_ROW, f"none of {', '.join(_FIELD.values())} among its keys ({', '.join(map(repr, list(row)[:8]))})")


def source_id(row: dict[str, Any], place: str) -> str:
    """The row's own id, or its place."""
    for field in _ID_FIELDS:
        value = row.get(field)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)
    return place


def parse(kind: str, row: dict[str, Any], vocab_size: int | None) -> Tokens | Conversation:
    """Check a row of this kind. ``vocab_size`` bounds given ids, None where it is not known.

    Raises:
        RowError: ``bad_row``, ``empty_prompt``, ``bad_token_id`` or ``no_supervised_token``.
    """
    if _FIELD[kind] not in row:
        raise RowError(ErrorCode.BAD_ROW, f"no {_FIELD[kind]!r}, which rows of this file ({kind}) have")
    return _tokens(row, vocab_size) if kind == TOKENIZED else _conversation(_FIELD[kind], row)


def _tokens(row: dict[str, Any], vocab_size: int | None) -> Tokens:
    ids = row["input_ids"]
    if not isinstance(ids, list):
        raise RowError(ErrorCode.BAD_ROW, f"input_ids is {_name(ids)}, not an array")
    if not ids:
        raise RowError(ErrorCode.EMPTY_PROMPT, "input_ids is empty")
    # One pass in C; bool has to be looked for, because it passes for an int everywhere.
    if set(map(type, ids)) != {int}:
        at = next(i for i, v in enumerate(ids) if type(v) is not int)
        raise RowError(ErrorCode.BAD_TOKEN_ID, f"input_ids[{at}] is {_name(ids[at])}, not an integer")
    try:
        values = np.frombuffer(array.array("i", ids), np.int32)
        in_range = int(values.min()) >= 0 and (vocab_size is None or int(values.max()) < vocab_size)
    except OverflowError:
        in_range = False
    if not in_range:
        limit = (1 << 31) if vocab_size is None else vocab_size
        at = next(i for i, v in enumerate(ids) if not 0 <= v < limit)
        raise RowError(ErrorCode.BAD_TOKEN_ID, f"input_ids[{at}] is {ids[at]}, outside [0, {limit})")
    return Tokens(input_ids=values, loss_mask=_mask(row.get("loss_mask"), len(ids)))


def _mask(mask: Any, num_tokens: int) -> npt.NDArray[np.uint8]:
    if mask is None:
        return np.ones(num_tokens, np.uint8)
    if not isinstance(mask, list) or len(mask) != num_tokens:
        what = f"has {len(mask)} values" if isinstance(mask, list) else f"is {_name(mask)}"
        raise RowError(ErrorCode.BAD_ROW, f"loss_mask {what}, input_ids has {num_tokens}")
    try:
        values = np.frombuffer(bytes(mask), np.uint8)
        valid = int(values.max()) <= 1
    except (TypeError, ValueError):
        valid = False
    if not valid:
        at = next(i for i, v in enumerate(mask) if not isinstance(v, int) or v not in (0, 1))
        raise RowError(ErrorCode.BAD_ROW, f"loss_mask[{at}] is {mask[at]!r:.40}, not 0 or 1")
    if not values.any():
        raise RowError(ErrorCode.NO_SUPERVISED_TOKEN, "loss_mask is 0 everywhere")
    return values


def _conversation(field: str, row: dict[str, Any]) -> Conversation:
    turns = row[field]
    if not isinstance(turns, list):
        raise RowError(ErrorCode.BAD_ROW, f"{field} is {_name(turns)}, not an array")
    if not turns:
        raise RowError(ErrorCode.EMPTY_PROMPT, f"{field} is empty")
    tools = row.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise RowError(ErrorCode.BAD_ROW, "tools is not an array of objects")
    messages = [_message(f"{field}[{i}]", turn) for i, turn in enumerate(turns)]
    if not any(m["role"] == "assistant" for m in messages):
        raise RowError(ErrorCode.NO_SUPERVISED_TOKEN, f"{field} has no assistant turn")
    return Conversation(messages=messages, tools=tools)


def _message(place: str, turn: Any) -> dict[str, Any]:
    """One turn in either spelling, {role, content} or {from, value}; other keys (tool_calls, name …) are the template's."""
    if not isinstance(turn, dict):
        raise RowError(ErrorCode.BAD_ROW, f"{place} is {_name(turn)}, not an object")
    given, content_key = (turn["role"], "content") if "role" in turn else (turn.get("from"), "value")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise RowError(ErrorCode.BAD_ROW, f"{place} has the role {given!r:.40}; known are {', '.join(_ROLES)}")
    content = _text(f"{place}.{content_key}", turn.get(content_key), optional=bool(turn.get("tool_calls")))
    rest = {k: v for k, v in turn.items() if k not in ("role", "content", "from", "value") and v is not None}
    return {"role": role, "content": content, **rest}


def _text(place: str, content: Any, *, optional: bool) -> str:
    """Text, or a list of text parts joined. null is a turn's content only where the turn calls tools."""
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type", "text") == "text" else None for p in content]
        texts = [p for p in parts if isinstance(p, str)]
        if len(texts) != len(parts):
            raise RowError(ErrorCode.BAD_ROW, f"{place} has a part that is not {{type: text, text: …}}: only text can be captured")
        return "".join(texts)
    raise RowError(ErrorCode.BAD_ROW, f"{place} is {_name(content)}, not text")


def _name(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "an integer",
        float: "a float",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
