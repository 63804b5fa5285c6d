"""Pages of lists that are newest first: a cursor is a place in the order, not an element.

Invariant: a cursor stays valid whatever is made or deleted in between, and whatever filters the next request has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ..contracts.errors import ErrorCode, RequestError


class _Made(Protocol):
    @property
    def created_at(self) -> float: ...


Spec = TypeVar("Spec", bound=_Made)


def page(
    specs: Iterable[Spec], key: Callable[[Spec], str], wanted: Callable[[Spec], bool], cursor: str | None, limit: int
) -> tuple[list[Spec], str | None]:
    """The next ``limit`` of ``specs`` (newest first, then by ``key`` from the last to the first), and the cursor after them.

    Raises RequestError for a cursor that is none.
    """
    after = None if cursor is None else _place(cursor)
    found: list[Spec] = []
    for spec in specs:
        if (after is None or (spec.created_at, key(spec)) < after) and wanted(spec):
            if len(found) == limit:
                last = found[-1]
                return found, f"{last.created_at!r}~{key(last)}"
            found.append(spec)
    return found, None


def _place(cursor: str) -> tuple[float, str]:
    at, mark, name = cursor.partition("~")
    try:
        place = float(at)
    except ValueError:
        place = math.nan
    if not mark or not math.isfinite(place):
        raise RequestError(ErrorCode.INVALID_REQUEST, "cursor: not one of this list", field="cursor")
    return place, name
