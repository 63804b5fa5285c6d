"""A sample file's tensors by name, as they were captured, whatever its encoding.

Invariant: what is given out has the model's dtype and the shapes of a raw file. Raw states are mapped, not copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..contracts.errors import ErrorCode, StatetapError, StoreError
from ..contracts.sample_format import PLANES, SCALES, Encoding, SampleFormat
from ..contracts.tensors import INPUT_IDS, LOSS_MASK, POSITIONS, state_planes
from .decode import SampleFile
from .encode import by_value

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Tensors(Protocol):
    def get_tensor(self, name: str) -> torch.Tensor: ...


@contextlib.contextmanager
def open_sample(path: Path, format: SampleFormat) -> Iterator[Tensors]:
    """``get_tensor`` with the names of a raw file. Raises StoreError ``file_missing`` or ``file_corrupt``, in the block too."""
    try:
        if format.encoding == Encoding.ZSTD:
            yield _Decompressed(path, format)
        else:
            with safe_open(path, framework="pt") as f:
                yield f if format.encoding == Encoding.RAW else _Scaled(f, format)
    except FileNotFoundError as e:
        raise StoreError(ErrorCode.FILE_MISSING, f"{path}: its record names it, and it is not there") from e
    except (SafetensorError, OSError, KeyError) as e:
        raise StoreError(ErrorCode.FILE_CORRUPT, f"{path}: {e}") from e
    except StoreError:
        raise  # of another file that was read in the block (the norm)
    except StatetapError as e:
        raise StoreError(ErrorCode.FILE_CORRUPT, f"{path}: {e.message}") from e


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

    def __init__(self, path: Path, format: SampleFormat) -> None:
        self._format, self._planes = format, dict[str, Any]()
        with SampleFile(path, format) as f:
            _, header = f.head()
            ids, mask, positions = f.row(header)
            self._tokens = len(ids) if positions is None else len(positions)
            self._small = {INPUT_IDS: torch.from_numpy(ids.copy()), LOSS_MASK: torch.from_numpy(mask.copy())}
            if positions is not None:
                self._small[POSITIONS] = torch.from_numpy(positions.copy())
            for name, _ in state_planes(format.kept):
                tensor = header.tensors[name + PLANES]
                self._planes[name] = f.read(tensor.stop - tensor.start)

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
