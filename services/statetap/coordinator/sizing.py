"""How big a job would be, whether that fits, and what would. Runs in a thread; reads lengths only, a record batch at a time.

Invariant: bytes are exact for rows that are done and not reused, because a sample file's size follows from its tokens alone (but for zstd: there
they are an upper bound). Memory does not grow with rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..contracts.errors import ErrorCode, RequestError, StoreError
from ..contracts.positions import ALL, Positions
from ..contracts.profile import CaptureProfile
from ..contracts.sample_format import Encoding, SampleFormat
from ..store.fs import free_bytes
from ..store.rows import RowsFile
from .catalog import Catalog
from .space import Alternative

Counts = npt.NDArray[np.int64]
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which rows of a dataset a job takes: the first ``rows`` (0: all), and of them those of up to ``longest`` tokens."""

    longest: int
    rows: int = 0

    @classmethod
    def of(cls, profile: CaptureProfile, rows: int | None, max_length: int | None) -> Choice:
        """Raises RequestError ``invalid_request`` for a max_length that the engine does not take."""
        if max_length is not None and max_length > profile.max_length:
            raise RequestError(
                ErrorCode.INVALID_REQUEST,
                f"max_length: {max_length} is more than the {profile.max_length} that the engine takes",
                field="max_length",
            )
        return cls(longest=max_length or profile.max_length, rows=rows or 0)

    def counts(self, rows: RowsFile, positions: Positions) -> Iterator[tuple[Counts, Counts]]:
        """(tokens, and of them those at ``positions``) of the rows taken, by record batch, sent or not."""
        left = self.rows or rows.rows
        for counts, kept in rows.counts(positions):
            if left <= 0:
                return
            yield counts[:left], kept[:left]
            left -= len(counts)

    def sendable(self, rows: RowsFile) -> Iterator[Counts]:
        """Tokens, with 0 for rows that are not sent: bad ones and longer ones."""
        for counts, _ in self.counts(rows, Positions(ALL)):
            yield np.where(counts <= self.longest, counts, 0)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a job would prefill and write; ``kept``: tokens whose states it keeps. ``longest`` is the longest of its rows, skipped or not."""

    rows: int
    accepted: int
    tokens: int
    kept: int
    bytes: int
    longest: int

    def bytes_in(self, format: SampleFormat) -> int:
        """In another encoding of the same positions."""
        return format.bytes(self.tokens, self.kept, self.accepted)


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of the store: free, and of them those that running jobs still need and those that always stay free."""

    free: int
    reserved: int
    kept_free: int

    @property
    def available(self) -> int:
        return self.free - self.reserved - self.kept_free


def least_free(store: Path, setting: int) -> int:
    """Bytes that have to stay free: the setting, or 1 GiB or 2 % of the file system, whichever is less."""
    if setting:
        return setting
    s = os.statvfs(store)
    return min(GIB, s.f_blocks * s.f_frsize // 50)


def room(catalog: Catalog, reserved: int, min_free_bytes: int) -> Room:
    return Room(free=free_bytes(catalog.store), reserved=reserved, kept_free=least_free(catalog.store, min_free_bytes))


def measure(rows: RowsFile, format: SampleFormat, choice: Choice) -> Size:
    """Exact tokens of a job over these rows, and its bytes (an upper bound of them where the format is not exact)."""
    total = accepted = tokens = kept = longest = 0
    for counts, at in choice.counts(rows, format.where):
        fits = (counts > 0) & (counts <= choice.longest)
        total += len(counts)
        accepted += int(fits.sum())
        tokens += int(counts[fits].sum())
        kept += int(at[fits].sum())
        longest = max(longest, int(counts.max(initial=0)))
    return Size(rows=total, accepted=accepted, tokens=tokens, kept=kept, bytes=format.bytes(tokens, kept, accepted), longest=longest)


def alternatives(
    rows: RowsFile, format: SampleFormat, choice: Choice, size: Size, available: int, seen: Compressed | None = None
) -> list[Alternative]:
    """What would fit into ``available`` bytes: all rows in another encoding, fewer rows, or a shorter max_length; none where not even one row would.

    What zstd makes of states is known afterwards only: it is named with its upper bound, and with what it made of an earlier job's (``seen``).
    """
    return [*_encodings(format, size, available, seen), *_fewer(rows, format, choice, available)]


def _encodings(format: SampleFormat, size: Size, available: int, seen: Compressed | None) -> Iterator[Alternative]:
    for other in (Encoding.FP8, Encoding.ZSTD):
        if other == format.encoding:
            continue
        need = size.bytes_in(replace(format, encoding=other.value))
        most = {"rows": size.accepted, "tokens": size.tokens, "bytes": need}
        if other == Encoding.FP8 and need <= available:
            yield Alternative(change="states in FP8 (lossy)", field="encoding", value=other.value, fits=True, exact=True, **most)
        if other == Encoding.ZSTD and format.encoding == Encoding.RAW:
            expected = round(need * seen.ratio) if seen else None
            if available > (expected or 0):
                change = f"states compressed (lossless): {'not known how small' if seen is None else f'as {seen.job_id}, {seen.ratio:.0%} of it'}"
                yield Alternative(
                    change=change, field="encoding", value=other.value, fits=need <= available, exact=False, expected_bytes=expected, **most
                )


def _fewer(rows: RowsFile, format: SampleFormat, choice: Choice, available: int) -> list[Alternative]:
    base, per_token, per_kept = format.costs
    used = taken = accepted = tokens = 0
    cut_at = 0  # rows that fit
    by_length = np.zeros(choice.longest + 1, np.int64)  # rows of each length
    kept_by_length = np.zeros(choice.longest + 1, np.int64)  # and their kept positions
    cutting = True
    for lengths_now, kept in choice.counts(rows, format.where):
        counts = np.where(lengths_now <= choice.longest, lengths_now, 0)
        by_length += np.bincount(counts, minlength=choice.longest + 1)
        np.add.at(kept_by_length, counts, kept)
        if cutting:
            cost = np.where(counts > 0, base + counts * per_token + kept * per_kept, 0)
            n = int(np.searchsorted(used + np.cumsum(cost), available, side="right"))
            part = counts[:n]
            used += int(cost[:n].sum())
            accepted += int((part > 0).sum())
            tokens += int(part.sum())
            cut_at = taken + n
            cutting = n == len(counts)
            taken += len(counts)
    found = []
    if accepted:
        found.append(_alternative(format, "rows", cut_at, f"the first {cut_at:,} rows", accepted, tokens, used))
    lengths = np.arange(choice.longest + 1)
    by_length[0] = kept_by_length[0] = 0
    size_up_to = np.cumsum(by_length * (base + lengths * per_token) + kept_by_length * per_kept)
    most = int(np.searchsorted(size_up_to, available, side="right")) - 1
    n = int(by_length[: most + 1].sum())
    if 0 < most < choice.longest and n:
        found.append(
            _alternative(
                format,
                "max_length",
                most,
                f"only rows of up to {most:,} tokens",
                n,
                int((by_length * lengths)[: most + 1].sum()),
                int(size_up_to[most]),
            )
        )
    return found


def _alternative(format: SampleFormat, field: str, value: int, change: str, rows: int, tokens: int, size: int) -> Alternative:
    return Alternative(
        change=change,
        field=field,  # type: ignore[arg-type]
        value=value,
        rows=rows,
        tokens=tokens,
        bytes=size,
        fits=True,
        exact=format.exact,
    )


def preflight(
    rows: RowsFile, format: SampleFormat, choice: Choice, size: Size, need: int, available: Room, seen: Compressed | None = None
) -> None:
    """Refuse a job that would fill the store. ``need``: bytes that it holds at once, which are fewer than all where files are freed when read.

    Raises:
        StoreError: ``store_full`` with the numbers, and what would fit.
    """
    if need <= available.available:
        return
    missing = need - available.available
    others = alternatives(rows, format, choice, size, available.available, seen)
    fit, may = ("; ".join(f"{a.change} ({a.field}={a.value}: {told(a)})" for a in others if a.fits == wanted) for wanted in (True, False))
    at_most = "" if format.exact else "at most "
    raise StoreError(
        ErrorCode.STORE_FULL,
        f"the job needs {at_most}{need:,} bytes; the store has {available.free:,} free, of which running jobs still need {available.reserved:,} and "
        f"{available.kept_free:,} stay free: {missing:,} are missing. "
        + (f"What would fit: {fit}. " if fit else "Not even its first row would fit. ")
        + (f"What may: {may}. " if may else "")
        + "`force` accepts it all the same.",
        numbers={
            "needed": need,
            "free": available.free,
            "reserved": available.reserved,
            "kept_free": available.kept_free,
            "missing": missing,
            **_numbers(others),
        },
    )


def told(a: Alternative) -> str:
    """Its bytes, for a person."""
    if a.exact:
        return f"{a.bytes:,} bytes"
    return f"at most {a.bytes:,} bytes{'' if a.expected_bytes is None else f', about {a.expected_bytes:,}'}"


def _numbers(others: list[Alternative]) -> dict[str, int]:
    found: dict[str, int] = {}
    for a in others:
        name = str(a.value) if a.field == "encoding" else a.field
        if isinstance(a.value, int):
            found[f"fits_{name}"] = a.value
        found[f"fits_{name}_bytes" if a.fits else f"most_{name}_bytes"] = a.bytes
        if a.expected_bytes is not None:
            found[f"expected_{name}_bytes"] = a.expected_bytes
    return found


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """What zstd made of an earlier job of the same states: ``ratio`` of its bytes to their upper bound."""

    job_id: str
    ratio: float


def compressed(catalog: Catalog, format: SampleFormat) -> Compressed | None:
    """Of the newest job that has ended and kept these states by zstd."""
    wanted = replace(format, encoding=Encoding.ZSTD.value).format_id
    for spec in catalog.jobs():
        if spec.encoding != Encoding.ZSTD or spec.sample_format.format_id != wanted:
            continue
        final = catalog.control(spec.job_id).final
        done, tokens, size = (int(final.get(k, 0)) for k in ("done", "tokens", "bytes"))
        if done:
            return Compressed(job_id=spec.job_id, ratio=size / (spec.bytes * tokens / spec.tokens))
    return None
