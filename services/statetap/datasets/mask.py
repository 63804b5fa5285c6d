"""Conversations -> token ids and the loss mask: 1 for the tokens that the assistant wrote (its end-of-turn included).

Invariant: no token that holds a character of another role is ever supervised. A row where the assistant's text cannot be located
exactly is ``mask_ambiguous``; it is never guessed. The whole text is tokenised once, as the engine will see it.

How a turn is located, in this order:

1. the template marks it with ``{% generation %}``;
2. ``render(turns before, generation prompt)`` and ``render(turns up to and with it)`` are both exact prefixes of the full rendering;
3. the former is a prefix, and what follows it is the turn's content and end-of-turn to the letter. That is how templates
   are served that render an earlier turn otherwise than a last one (Qwen3 drops ``<think>`` blocks).
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ..contracts.errors import ErrorCode, RequestError, RowError
from .kinds import Conversation, Tokens

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# A template is code of the model's maker that runs on the user's data: what it raises is said of the row.
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

Span = tuple[int, int]
"""Characters [start, stop) of the rendered text."""


class Masker:
    """A tokenizer and its chat template. ``vocab_size`` counts every id that the tokenizer can give."""

    def __init__(self, name: str, *, trust_remote_code: bool = False) -> None:
        """Load from a folder or the hub. Raises RequestError ``dataset_failed``."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except Exception as e:
            raise RequestError(ErrorCode.DATASET_FAILED, f"the tokenizer {name!r} cannot be loaded: {_first_line(e)}") from e
        self._name = name
        # Added tokens may leave a gap behind the base vocabulary.
        self.vocab_size = max(len(self._tokenizer), *(i + 1 for i in self._tokenizer.added_tokens_decoder), 0)

    def require_template(self) -> None:
        """Raises RequestError ``dataset_failed`` when conversations cannot be rendered at all."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(
                ErrorCode.DATASET_FAILED, f"the tokenizer {self._name!r} has no chat template; submit tokenised rows, or add one"
            )

    def encode(self, conversations: Sequence[Conversation]) -> list[Tokens | RowError]:
        """Ids and mask of each conversation, or why it has none. All texts are tokenised in one call."""
        located: list[tuple[str, list[Span]] | RowError] = []
        for conversation in conversations:
            try:
                located.append(self._locate(conversation))
            except RowError as e:
                located.append(e)
        good = [x for x in located if not isinstance(x, RowError)]
        encoded = iter(self._tokenize(good))
        return [x if isinstance(x, RowError) else next(encoded) for x in located]

    # -- text and spans

    def _locate(self, conversation: Conversation) -> tuple[str, list[Span]]:
        try:
            template = self._tokenizer.get_chat_template(None, conversation.tools)
            if _GENERATION.search(template):
                return self._marked(template, conversation)
            full = self._render(conversation, len(conversation.messages), prompt=False)
        except _TEMPLATE_ERRORS as e:
            raise RowError(ErrorCode.BAD_ROW, f"the chat template refuses the conversation: {_first_line(e)}") from e
        turns = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        # A first turn by the assistant answers nothing: there is no rendering in front of it, and it stays context.
        spans = [self._turn(conversation, full, i) for i in turns if i > 0]
        if not spans:
            raise RowError(ErrorCode.NO_SUPERVISED_TOKEN, "the only assistant turn is the first one, which answers nothing")
        return full, spans

    def _marked(self, template: str, conversation: Conversation) -> tuple[str, list[Span]]:
        """Rule 1. transformers' own assistant mask is not used: it marks to the end of the text where a span's last character
        has no token of its own, and drops the last bytes of a character that is several tokens."""
        # transformers annotates this function as if it gave text alone
        render: Any = render_jinja_template
        texts, spans = render(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        found = [(a, b) for a, b in spans[0] if a < b]
        if not found:
            raise RowError(ErrorCode.MASK_AMBIGUOUS, "the chat template's {% generation %} marks nothing in this conversation")
        if sum(b - a for a, b in found) >= len(texts[0]):
            raise RowError(ErrorCode.MASK_AMBIGUOUS, "the chat template's {% generation %} marks the whole conversation, prompts included")
        return texts[0], found

    def _render(self, conversation: Conversation, turns: int, *, prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            conversation.messages[:turns], tools=conversation.tools, add_generation_prompt=prompt, tokenize=False
        )
        return text

    def _turn(self, conversation: Conversation, full: str, i: int) -> Span:
        """Rules 2 and 3 for the assistant turn i > 0."""
        last = i + 1 == len(conversation.messages)
        try:
            before = self._render(conversation, i, prompt=True)
            after = full if last else self._render(conversation, i + 1, prompt=False)
        except _TEMPLATE_ERRORS as e:
            raise RowError(ErrorCode.MASK_AMBIGUOUS, f"turn {i}: the chat template refuses its beginning: {_first_line(e)}") from e
        if full.startswith(before) and after.startswith(before):
            start = len(before)
            if full.startswith(after):
                return start, len(after)
            for content in _spellings(conversation.messages[i]["content"]):
                at = after.rfind(content, start)
                end_of_turn = after[at + len(content) :]
                if at >= 0 and full.startswith(content + end_of_turn, start):
                    return start, start + len(content) + len(end_of_turn)
        raise RowError(
            ErrorCode.MASK_AMBIGUOUS, f"turn {i}: what the chat template renders up to it is no exact beginning of the whole rendering"
        )

    # -- tokens

    def _tokenize(self, located: list[tuple[str, list[Span]]]) -> list[Tokens | RowError]:
        if not located:
            return []
        fast = bool(self._tokenizer.is_fast)
        batch = self._tokenizer(
            [text for text, _ in located],
            add_special_tokens=False,  # the template has put in all there are
            return_offsets_mapping=fast,
            return_attention_mask=False,
            verbose=False,  # no warning of a model's length: max_length is checked by us
        )
        rows: list[Tokens | RowError] = []
        for i, (text, spans) in enumerate(located):
            ids = batch["input_ids"][i]
            try:
                mask = _mask_by_offsets(batch["offset_mapping"][i], spans) if fast else self._mask_by_prefixes(text, ids, spans)
                rows.append(_checked(ids, mask))
            except RowError as e:
                rows.append(e)
        return rows

    def _mask_by_prefixes(self, text: str, ids: list[int], spans: list[Span]) -> npt.NDArray[np.uint8]:
        """For tokenizers without offsets (Kimi-K2): the tokens of the text up to a boundary must begin the tokens of the whole."""
        mask = np.zeros(len(ids), np.uint8)
        for span in spans:
            edges = []
            for stop in span:
                head = self._tokenizer(text[:stop], add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
                if ids[: len(head)] != head:
                    raise RowError(ErrorCode.MASK_AMBIGUOUS, f"a token spans the edge of an assistant turn at character {stop}")
                edges.append(len(head))
            mask[edges[0] : edges[1]] = 1
        return mask


def _mask_by_offsets(offsets: list[tuple[int, int]], spans: list[Span]) -> npt.NDArray[np.uint8]:
    """Tokens that lie wholly within a span. One that reaches over an edge holds template or user text and is left out."""
    starts = [a for a, _ in offsets]
    mask = np.zeros(len(offsets), np.uint8)
    for start, stop in spans:
        first, last = bisect.bisect_left(starts, start), bisect.bisect_left(starts, stop)
        while last > first and offsets[last - 1][1] > stop:
            last -= 1
        mask[first:last] = 1
    return mask


def _checked(ids: list[int], mask: npt.NDArray[np.uint8]) -> Tokens:
    if not ids:
        raise RowError(ErrorCode.EMPTY_PROMPT, "the conversation renders to no token")
    if not mask.any():
        raise RowError(ErrorCode.NO_SUPERVISED_TOKEN, "the assistant's turns hold no token of their own")
    return Tokens(input_ids=np.array(ids, np.int32), loss_mask=mask)


def _spellings(content: str) -> list[str]:
    """How templates write a turn's content: as it is, stripped, and without what goes before ``</think>``."""
    answer = content.rpartition("</think>")[2]
    return [s for s in dict.fromkeys([content, content.strip(), answer.lstrip("\n"), answer.strip()]) if s]


def _first_line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:300]
