"""What a sample file holds, without torch: its header, ids and mask, and its states block by block for a full check.

Invariant: content is read from the beginning on and never past its end; a file that is too short, or does not decompress, is ``file_corrupt``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..contracts.errors import ErrorCode, RowError
from ..contracts.sample_format import Encoding, SampleFormat
from ..contracts.tensors import BLOCK, INPUT_IDS, LOSS_MASK, POSITIONS, Header, parse_header, state_planes
from .check import Bytes, StateChecker
from .encode import by_value
from .positions import Indices
from .samples import Opens


class FileRow(NamedTuple):
    """``ids`` [T], ``mask`` [T]; ``positions`` [n] whose states the file holds, None for all."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    positions: Indices | None


class SampleFile:
    """A sample file, open: its uncompressed content as a stream. Raises OSError where it cannot be read."""

    def __init__(self, samples: Opens, name: str, format: SampleFormat) -> None:
        self._name, self._format = name, format
        self._file = samples.open(name)
        self._stream = pa.CompressedInputStream(self._file, "zstd") if format.encoding == Encoding.ZSTD else self._file

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.close()
        self._file.close()

    @property
    def size(self) -> int:
        """Of the file."""
        return int(self._file.size())

    def read(self, size: int) -> Bytes:
        """The next ``size`` bytes. Raises RowError ``file_corrupt`` when there are fewer."""
        data = np.frombuffer(self._read(size), np.uint8)
        if len(data) < size:
            raise RowError(ErrorCode.FILE_CORRUPT, f"{self._name} ends {size - len(data)} bytes too early")
        return data

    def _read(self, size: int) -> Any:
        parts, left = [], size
        try:
            while left and (part := self._stream.read(left)):  # a compressed stream may give less than there is
                parts.append(part)
                left -= len(part)
        except OSError as e:
            if self._format.encoding == Encoding.ZSTD and e.errno is None:
                raise RowError(ErrorCode.FILE_CORRUPT, f"{self._name} does not decompress: {e}") from e
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def head(self) -> tuple[bytes, Header]:
        """The header's block. Raises StatetapError ``shape_mismatch`` for no header, RowError ``file_corrupt``."""
        head = self.read(BLOCK).tobytes()
        return head, parse_header(head)

    def row(self, header: Header) -> FileRow:
        """Right after :meth:`head`."""
        ids, mask = header.tensors[INPUT_IDS], header.tensors[LOSS_MASK]
        start = header.tensors[POSITIONS].start if self._format.thinned else ids.start
        if self._format.encoding != Encoding.ZSTD:
            self._stream.seek(start)
        data = self.read(mask.stop - start)
        return FileRow(
            ids=data[ids.start - start : ids.stop - start].view(np.int32),
            mask=data[mask.start - start :],
            positions=data[: ids.start - start].view(np.int32) if self._format.thinned else None,
        )

    def states(self, kept: int, update: Callable[[Any], object]) -> None:
        """Read and check the states of ``kept`` positions, where the stream stands before them; each piece is given to ``update`` as it lies
        in the content.

        Raises:
            RowError: ``nonfinite_states``, ``zero_states``, ``file_corrupt``.
        """
        format = self._format
        checker = StateChecker(format.kept, kept, dtype="F8_E4M3" if format.encoding == Encoding.FP8 else None)
        for block in checker.blocks():
            data = self.read(block.stop - block.start)
            update(data)
            checker.look(block, by_value(data, format.item_size) if format.encoding == Encoding.ZSTD else data)
        if not format.thinned:
            checker.finish()  # of a whole row; those that are kept may be padding alone
        if format.encoding == Encoding.FP8:
            for name, width in state_planes(format.kept):
                scales = self.read(4 * width * kept)
                update(scales)
                values = scales.view(np.float32)
                if not (np.isfinite(values).all() and (values > 0).all()):
                    raise RowError(ErrorCode.NONFINITE_STATES, f"{self._name}: a scale of {name} is not a positive number")
