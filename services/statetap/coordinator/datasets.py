"""Accepting datasets and saying how they stand.

Invariant: what is answered 202 is durable (the source's bytes or its path, and dataset.json); the same source with the same options
is the same dataset. Ingestion is the reconciler's to enqueue, so Redis need not be there to accept one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import DATASET_SPEC, RAW, REPORT
from ..contracts.records import DatasetSpec, DatasetState, DatasetStatus
from ..store.fs import create_file, fsync_dir, make_dirs, remove, store_error, to_json
from . import models
from .catalog import Catalog
from .uploads import Upload

Begin = Callable[[str], None]  # called with the dataset's id before anything of it is made
_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,8}){1,2}$")  # for people; the reader goes by what is in the file
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


def allowed_path(text: str, data_dir: Path | None, *, any_path: bool, field: str = "path") -> Path:
    """The resolved path of a dataset file, which ``field`` of the request names.

    Raises RequestError ``path_not_allowed`` or ``invalid_request``.
    """
    if "\0" in text:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{field}: has a NUL byte", field=field)
    if data_dir is None and not any_path:
        raise RequestError(ErrorCode.PATH_NOT_ALLOWED, f"{field}: this coordinator has no data folder (STATETAP_DATA_DIR)", field=field)
    base = data_dir.resolve() if data_dir is not None else None
    path = Path(text)
    if not path.is_absolute():
        if base is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"{field}: {text!r} is not absolute", field=field)
        path = base / path
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as e:  # a loop of links
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{field}: {text!r} does not resolve: {e}", field=field) from e
    if not any_path and base is not None and not path.is_relative_to(base):
        # Before any look at it, so that nothing can be learned about files elsewhere.
        raise RequestError(ErrorCode.PATH_NOT_ALLOWED, f"{field}: {text!r} is not below the data folder", field=field)
    if not path.is_file():
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{field}: no file at {text!r}", field=field)
    return path


def accept(
    catalog: Catalog, sources: Sequence[Path | Upload], options: models.DatasetOptions, tokenizer: str, begin: Begin, *, merged: bool
) -> tuple[DatasetSpec, bool]:
    """Make the dataset of a file, or of several when ``merged``; (its spec, whether ingestion is needed).

    Paths are resolved and allowed. The caller removes an upload's own name afterwards.

    Raises:
        RequestError: ``conflict`` when an upload was made another dataset before and is gone, ``invalid_request``.
        StoreError: the store is full, or fails.
    """
    identities = [_identity(s) for s in sources]
    dataset_id = _dataset_id({"sources": identities} if merged else identities[0], options, tokenizer)
    begin(dataset_id)
    raw = catalog.dataset_path(dataset_id) / RAW
    places = [s if isinstance(s, Path) else raw / _raw_name(s, i if merged else None) for i, s in enumerate(sources)]
    first = sources[0]
    name = first.name if isinstance(first, Path) else Path(first.filename).name or dataset_id
    spec = DatasetSpec(
        dataset_id=dataset_id,
        name=options.name or (f"{name} and {len(sources) - 1} more" if len(sources) > 1 else name),
        path="" if merged else str(places[0]),
        format=options.format,
        tokenizer=tokenizer,
        trust_remote_code=options.trust_remote_code,
        max_length=options.max_length,
        truncate=options.truncate,
        sources=[str(p) for p in places] if merged else [],
        shuffle_seed=options.shuffle,
        created_at=time.time(),
    )
    try:
        if not (catalog.dataset_path(dataset_id) / DATASET_SPEC).exists():
            for source, place in zip(sources, places, strict=True):
                if not isinstance(source, Path):
                    make_dirs(place.parent)
                    # A link, so that a crash before dataset.json leaves the upload as it was. Two at once put the same bytes there.
                    with contextlib.suppress(FileExistsError):
                        os.link(source.path, place)
                    fsync_dir(place.parent)
        return _accept(catalog, spec)
    except FileNotFoundError as e:
        raise RequestError(
            ErrorCode.CONFLICT, "the upload was made another dataset before: upload the file again", field="upload_id"
        ) from e
    except OSError as e:
        raise store_error(e, "keep the upload") from e


def _identity(source: Path | Upload) -> dict[str, Any]:
    if not isinstance(source, Path):
        return {"sha256": source.sha256}
    try:
        found = os.stat(source)
    except OSError as e:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"path: {source}: {e.strerror}", field="path") from e
    return {"path": str(source), "size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _raw_name(upload: Upload, number: int | None) -> str:
    """Where an upload is kept below ``raw/``: among several by its own name, which errors of rows tell."""
    if number is not None:
        return f"{number}/{_UNSAFE.sub('_', Path(upload.filename).name)[-100:].lstrip('.') or 'source'}"
    suffix = _SUFFIX.search(upload.filename)
    return f"source{suffix[0].lower() if suffix else ''}"


def _dataset_id(source: dict[str, Any], options: models.DatasetOptions, tokenizer: str) -> str:
    """Over the source and all that changes what its rows become; the name is not part of it."""
    identity = source | {
        "format": options.format,
        "tokenizer": tokenizer,
        "max_length": options.max_length,
        "truncate": options.truncate,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.shuffle is not None:
        identity["shuffle"] = options.shuffle
    return "ds-" + hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _accept(catalog: Catalog, spec: DatasetSpec) -> tuple[DatasetSpec, bool]:
    """The first one to say what the dataset is wins."""
    dataset_id, folder = spec.dataset_id, catalog.dataset_path(spec.dataset_id)
    make_dirs(folder)
    if create_file(folder / DATASET_SPEC, to_json(spec.to_dict())):
        return spec, True
    report = catalog.report(dataset_id)
    if report is not None and report.state == DatasetState.FAILED:
        # What failed it (a tokenizer that could not be fetched, a killed process) may be gone: asking again means trying again.
        remove(folder / REPORT)
        fsync_dir(folder)
        report = None
    return catalog.dataset(dataset_id), report is None


def describe(catalog: Catalog, spec: DatasetSpec, progress: str | bytes | None) -> models.Dataset:
    """The report where there is one, else the ingestion's progress (JSON from Redis), else its start."""
    status = catalog.report(spec.dataset_id) or _progress(spec.dataset_id, progress)
    return models.Dataset(
        **status.to_dict(),
        name=spec.name,
        format=spec.format,
        tokenizer=spec.tokenizer,
        sources=spec.labels,
        shuffle_seed=spec.shuffle_seed,
        created_at=spec.created_at,
    )


def _progress(dataset_id: str, text: str | bytes | None) -> DatasetStatus:
    try:
        status = DatasetStatus.from_dict(json.loads(text)) if text else None
    except (ValueError, TypeError, AttributeError):
        status = None
    if status is None or status.dataset_id != dataset_id or status.state != DatasetState.INGESTING:
        # "ready" is believed of the report only: progress can be ahead of the disk.
        return DatasetStatus(dataset_id=dataset_id, state=DatasetState.INGESTING.value)
    return status
