"""What a trainer format is: where a row's file lies, what it holds, and how that system names layers.

Invariant: a format says nothing about how files become durable or which rows there are (run.py, source.py), and it changes no number: rows
are unshifted, unpadded and in the model's dtype. This module imports no package, so that the command line can name the formats at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Tokens: TypeAlias = "tuple[Item, npt.NDArray[np.int64], npt.NDArray[np.int64]]"
"""A row, its ids [T] and its loss mask [T]."""

Final = Literal["post", "pre"]
FormatName = Literal["specforge", "speculators", "vllm", "modelopt", "angelslim", "eagle1"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A done row of a job. ``index`` is its place in the export, ``row`` its place in the source; ``path``, ``bytes`` and ``xxh3`` are
    those of its native file."""

    index: int
    row: int
    source_id: str
    tokens: int
    bytes: int
    path: str
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What a format may need for files beside the rows. ``tokens`` streams all rows anew at each call."""

    out: Path
    tokens: Callable[[], Iterator[Tokens]]
    vocab_size: int
    draft_vocab: int  # 0: no mapping is asked for


class Format(ABC):
    """One trainer's files. Class attributes:

    ``title``: the system's own name. ``finals``: the final states that its files can hold, first the one that its trainers expect.
    ``has_aux``: whether aux states are kept. ``three``: its trainers expect three boundaries. ``data``: the folder to give to the trainer,
    below the export's. ``can_gzip``. ``mapping``: where its trainers look for ``{d2t, t2d}`` ("" for a format that has none).
    """

    name: ClassVar[FormatName]
    title: ClassVar[str]
    finals: ClassVar[tuple[Final, ...]]
    has_aux: ClassVar[bool] = True
    three: ClassVar[bool] = True
    data: ClassVar[str] = "."
    can_gzip: ClassVar[bool] = False
    mapping: ClassVar[str] = ""

    @abstractmethod
    def path(self, item: Item) -> str:
        """Of the row's file below the export, POSIX; different for different rows, and no part of it starts with a dot."""

    @abstractmethod
    def content(self, item: Item, sample: Mapping[str, Any], final: Final) -> dict[str, Any]:
        """What the file holds, from an item as :class:`~statetap.store.reader.SampleLoader` gives it."""

    @abstractmethod
    def save(self, content: dict[str, Any], file: BinaryIO) -> None:
        """Write it. The same content gives the same bytes."""

    def layer_ids(self, boundaries: Sequence[int], num_layers: int) -> list[int | None]:
        """What this system calls the boundaries; None where it has no name for one. Here: block outputs, id = boundary - 1."""
        return [b - 1 if b else None for b in boundaries]

    def notes(self, draft_vocab: int) -> list[str]:
        """What a user of this format has to know of every export."""
        return []

    def side_files(self, finish: Finish) -> list[str]:
        """Write the files beside the rows, durably and whole; their paths below the export."""
        if not (self.mapping and finish.draft_vocab):
            return []
        from .vocab import write_mapping

        write_mapping(finish, self.mapping)
        return [self.mapping]


def layer_text(title: str, ids: Sequence[int | None], boundaries: Sequence[int]) -> str:
    """``SpecForge ids 1, 15, 29 = boundaries 2, 16, 30``."""
    return f"{title} ids {', '.join('none' if i is None else str(i) for i in ids)} = boundaries {', '.join(map(str, boundaries))}"


def rows_folder(row: int, size: int) -> str:
    """``rows_0-2000``, half-open, as SpecForge and AngelSlim name theirs."""
    start = row - row % size
    return f"rows_{start}-{start + size}"
