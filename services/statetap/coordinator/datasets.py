"""Accepting datasets and saying how they stand.

Invariant: what is answered 202 is durable (the source's bytes or its path, and dataset.json); the same source with the same options
is the same dataset. Ingestion is the reconciler's to enqueue, so Redis need not be there to accept one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ..contracts.errors import ErrorCode, RequestError
from ..contracts.layout import DATASET_SPEC, RAW, REPORT
from ..contracts.records import DatasetSpec, DatasetState, DatasetStatus
from ..store.fs import create_file, fsync_dir, make_dirs, remove, store_error, to_json
from . import models
from .catalog import Catalog
from .uploads import Upload

_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,8}){1,2}$")


def allowed_path(text: str, data_dir: Path | None, *, any_path: bool) -> Path:
    """The resolved path of a dataset file. Raises RequestError ``path_not_allowed`` or ``invalid_request``."""
    if "\0" in text:
        raise RequestError(ErrorCode.INVALID_REQUEST, "path: has a NUL byte", field="path")
    if data_dir is None and not any_path:
        raise RequestError(ErrorCode.PATH_NOT_ALLOWED, "path: this coordinator has no data folder (STATETAP_DATA_DIR)", field="path")
    base = data_dir.resolve() if data_dir is not None else None
    path = Path(text)
    if not path.is_absolute():
        if base is None:
            raise RequestError(ErrorCode.INVALID_REQUEST, f"path: {text!r} is not absolute", field="path")
        path = base / path
    try:
        path = path.resolve()
    except (OSError, RuntimeError) as e:  # a loop of links
        raise RequestError(ErrorCode.INVALID_REQUEST, f"path: {text!r} does not resolve: {e}", field="path") from e
    if not any_path and base is not None and not path.is_relative_to(base):
        # Before any look at it, so that nothing can be learned about files elsewhere.
        raise RequestError(ErrorCode.PATH_NOT_ALLOWED, f"path: {text!r} is not below the data folder", field="path")
    if not path.is_file():
        raise RequestError(ErrorCode.INVALID_REQUEST, f"path: no file at {text!r}", field="path")
    return path


def accept_path(catalog: Catalog, path: Path, options: models.DatasetOptions, tokenizer: str) -> tuple[DatasetSpec, bool]:
    """Make the dataset of a file; (its spec, whether ingestion is needed). ``path`` is resolved and allowed."""
    try:
        found = os.stat(path)
    except OSError as e:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"path: {path}: {e.strerror}", field="path") from e
    source = {"path": str(path), "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    return _accept(catalog, _dataset_id(source, options, tokenizer), str(path), options, options.name or path.name, tokenizer)


def accept_upload(catalog: Catalog, upload: Upload, options: models.DatasetOptions, tokenizer: str) -> tuple[DatasetSpec, bool]:
    """Make the dataset of an upload, which is moved away; (its spec, whether ingestion is needed)."""
    dataset_id = _dataset_id({"sha256": upload.sha256}, options, tokenizer)
    suffix = _SUFFIX.search(upload.filename)  # the format's reader goes by it
    raw = catalog.dataset_path(dataset_id) / RAW / f"source{suffix[0].lower() if suffix else ''}"
    try:
        if (catalog.dataset_path(dataset_id) / DATASET_SPEC).exists():
            return _accept(catalog, dataset_id, str(raw), options, "", tokenizer)
        make_dirs(raw.parent)
        os.replace(upload.path, raw)  # two at once put the same bytes there
        fsync_dir(raw.parent)
        return _accept(catalog, dataset_id, str(raw), options, options.name or Path(upload.filename).name or dataset_id, tokenizer)
    except OSError as e:
        raise store_error(e, "keep the upload") from e
    finally:
        remove(upload.path)


def _dataset_id(source: dict[str, Any], options: models.DatasetOptions, tokenizer: str) -> str:
    """Over the source and all that changes what its rows become; the name is not part of it."""
    identity = source | {
        "format": options.format,
        "tokenizer": tokenizer,
        "max_length": options.max_length,
        "truncate": options.truncate,
        "trust_remote_code": options.trust_remote_code,
    }
    return "ds-" + hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def _accept(
    catalog: Catalog, dataset_id: str, path: str, options: models.DatasetOptions, name: str, tokenizer: str
) -> tuple[DatasetSpec, bool]:
    spec = DatasetSpec(
        dataset_id=dataset_id,
        name=name,
        path=path,
        format=options.format,
        tokenizer=tokenizer,
        trust_remote_code=options.trust_remote_code,
        max_length=options.max_length,
        truncate=options.truncate,
        created_at=time.time(),
    )
    folder = catalog.dataset_path(dataset_id)
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
        **(status.to_dict() | {"name": spec.name, "format": spec.format, "tokenizer": spec.tokenizer, "created_at": spec.created_at})
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
