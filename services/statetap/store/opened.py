"""A sample file's tensors by name, as they were captured, whatever its encoding.

Invariant: what is given out has the model's dtype and the shapes of a raw file. Raw states are mapped, not copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..contracts.errors import ErrorCode, RowError, StatetapError, StoreError
from ..contracts.sample_format import PLANES, SCALES, Encoding, SampleFormat
from ..contracts.tensors import BLOCK, INPUT_IDS, LOSS_MASK, POSITIONS, parse_header, state_planes
from .check import Bytes
from .decode import SampleFile
from .encode import by_value
from .fs import store_error
from .samples import FolderSamples, Reads, fetched

_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "U8": torch.uint8,
}


class Tensors(Protocol):
    def get_tensor(self, name: str) -> torch.Tensor: ...


@contextlib.contextmanager
def open_sample(samples: Reads, name: str, format: SampleFormat) -> Iterator[Tensors]:
    """``get_tensor`` with the names of a raw file. Raises StoreError ``file_missing``, ``file_corrupt`` or ``store_io``, in the block too."""
    try:
        if format.encoding == Encoding.ZSTD:
            yield _Decompressed(samples, name, format)
        else:
            with _tensors(samples, name) as f:
                yield f if format.encoding == Encoding.RAW else _Scaled(f, format)
    except FileNotFoundError as e:
        raise StoreError(ErrorCode.FILE_MISSING, f"{samples.place(name)}: its record names it, and it is not there") from e
    except (SafetensorError, OSError, KeyError) as e:
        if isinstance(e, OSError) and e.errno:  # the disk's or the bucket's: the file may be whole. Without a number: a decoder's.
            raise store_error(e, f"read {name}") from e
        raise StoreError(ErrorCode.FILE_CORRUPT, f"{samples.place(name)}: {e}") from e
    except StoreError:
        raise  # of another file that was read in the block (the norm)
    except StatetapError as e:
        raise StoreError(ErrorCode.FILE_CORRUPT, f"{samples.place(name)}: {e.message}") from e


def _tensors(samples: Reads, name: str) -> contextlib.AbstractContextManager[Tensors]:
    """A safetensors file: mapped where it is one on disk, else as it came."""
    if isinstance(samples, FolderSamples):
        opened: contextlib.AbstractContextManager[Tensors] = safe_open(samples.root / name, framework="pt")
        return opened
    return contextlib.nullcontext(_InMemory(samples.map(name)))


class _InMemory:
    """A safetensors file in memory; its tensors are views of it."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._header = parse_header(data[:BLOCK].tobytes())
        if self._header.size != len(data):
            raise RowError(ErrorCode.FILE_CORRUPT, f"{len(data)} bytes, and its header says {self._header.size}")

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._header.tensors[name]
        raw = torch.from_numpy(self._data[tensor.start : tensor.stop])
        return raw.view(_DTYPES[tensor.dtype]).view(tensor.shape)


class _Scaled:
    """FP8: state = value * scale, in fp32 and rounded once."""

    def __init__(self, file: Any, format: SampleFormat) -> None:
        self._file, self._hidden, self._dtype = file, format.kept.hidden, _DTYPES[format.kept.dtype]
        self._states = {name for name, _ in state_planes(format.kept)}

    def get_tensor(self, name: str) -> torch.Tensor:
        if name not in self._states:
            return self._file.get_tensor(name)
        values = self._file.get_tensor(name)
        T = values.shape[0]
        states = values.float().view(T, -1, self._hidden).mul_(self._file.get_tensor(name + SCALES)[:, :, None])
        return states.to(self._dtype).view(T, -1)


class _Decompressed:
    """zstd: all of the file, decompressed once; its states are put together when they are asked for."""

    def __init__(self, samples: Reads, name: str, format: SampleFormat) -> None:
        self._format, self._planes = format, dict[str, Any]()
        with SampleFile(fetched(samples, name), name, format) as f:
            _, header = f.head()
            ids, mask, positions = f.row(header)
            self._tokens = len(ids) if positions is None else len(positions)
            self._small = {INPUT_IDS: torch.from_numpy(ids.copy()), LOSS_MASK: torch.from_numpy(mask.copy())}
            if positions is not None:
                self._small[POSITIONS] = torch.from_numpy(positions.copy())
            for plane, _ in state_planes(format.kept):
                tensor = header.tensors[plane + PLANES]
                self._planes[plane] = f.read(tensor.stop - tensor.start)

    def get_tensor(self, name: str) -> torch.Tensor:
        if name in self._small:
            return self._small[name]
        data, T, size = self._planes[name], self._tokens, self._format.item_size
        out = torch.empty(len(data), dtype=torch.uint8)
        view = out.numpy()
        token_bytes = len(data) // T
        chunk = self._format.chunk_tokens(token_bytes // (self._format.kept.hidden * size)) * token_bytes
        for at in range(0, len(data), chunk):
            view[at : at + chunk] = by_value(data[at : at + chunk], size)
        return out.view(_DTYPES[self._format.kept.dtype]).view(T, -1)
