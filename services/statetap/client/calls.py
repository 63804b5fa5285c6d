"""One function for each request of the API: path, parameters, body, and how its answer is read. Pure.

Invariant: ``repeatable`` is set only where sending the request twice does the same as sending it once; everything else is tried again
only when it never reached the coordinator.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, Unpack
from urllib.parse import quote

from .options import DatasetOptions, JobFilter, JobOptions
from .records import Acked, Answer, Collected, Dataset, Deleted, Engine, Estimate, Health, Job, Row, RowError, Service, Store, Upload

T = TypeVar("T")
A = TypeVar("A", bound=Answer)

TIMEOUT_S = 60.0
LONG_TIMEOUT_S = 600.0  # the coordinator hashes, plans or deletes many files before it answers
OFFSET_STREAM = "application/offset+octet-stream"
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True, kw_only=True)
class Page(Generic[A]):
    items: list[A]
    next_cursor: str | None


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """``content`` is a body of bytes, ``form`` and ``file`` (name, bytes) make a multipart one."""

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    content: bytes | None = None
    form: Mapping[str, str] | None = None
    file: tuple[str, bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    timeout_s: float = TIMEOUT_S


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if v is not None}


def _id(text: str) -> str:
    """One segment of a path, whatever the caller gave."""
    return quote(text, safe="")


def _key(given: str | None) -> dict[str, str]:
    """Made once a call, so that its repeats are the same request to the coordinator."""
    return {"Idempotency-Key": given or secrets.token_urlsafe(24)}


def _page(item: type[A]) -> Callable[[Any], Page[A]]:
    return lambda data: Page(items=[item.from_dict(i) for i in data["items"]], next_cursor=data.get("next_cursor"))


def _get(path: str, parse: Callable[[Any], T], **params: Any) -> Call[T]:
    return Call(method="GET", path=path, parse=parse, params=_given(params), repeatable=True)


# ------------------------------------------------------------------ datasets
def upload_form(filename: str, data: bytes, key: str | None, options: DatasetOptions) -> Call[Dataset]:
    fields = {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in _given(options).items()}
    return Call(
        method="POST", path="/v1/datasets", parse=Dataset.from_dict, form=fields, file=(filename, data), headers=_key(key), repeatable=True,
        timeout_s=LONG_TIMEOUT_S,
    )  # fmt: skip


def create_dataset(sources: Sequence[Mapping[str, str]], shuffle: int | None, key: str | None, options: DatasetOptions) -> Call[Dataset]:
    """``sources``: ``{"path": …}`` or ``{"upload_id": …}`` each."""
    what: dict[str, Any] = dict(sources[0]) if len(sources) == 1 and shuffle is None else {"sources": [dict(s) for s in sources]}
    body = {**what, **_given({"shuffle": shuffle}), **_given(options)}
    return Call(
        method="POST", path="/v1/datasets", parse=Dataset.from_dict, json=body, headers=_key(key), repeatable=True, timeout_s=LONG_TIMEOUT_S
    )


def dataset(dataset_id: str) -> Call[Dataset]:
    return _get(f"/v1/datasets/{_id(dataset_id)}", Dataset.from_dict)


def datasets(cursor: str | None, *, state: str | Sequence[str] | None = None, name: str | None = None) -> Call[Page[Dataset]]:
    return _get("/v1/datasets", _page(Dataset), cursor=cursor, state=state, name=name)


def delete_dataset(dataset_id: str, *, dry_run: bool, force: bool) -> Call[Deleted]:
    params = {"dry_run": dry_run, "force": force}
    path = f"/v1/datasets/{_id(dataset_id)}"
    return Call(method="DELETE", path=path, parse=Deleted.from_dict, params=params, repeatable=dry_run, timeout_s=LONG_TIMEOUT_S)


# ------------------------------------------------------------------ uploads
def start_upload(filename: str, size: int) -> Call[Upload]:
    # Sent twice it leaves an empty upload behind, which expires.
    return Call(method="POST", path="/v1/uploads", parse=Upload.from_dict, json={"filename": filename, "size": size}, repeatable=True)


def upload(upload_id: str) -> Call[Upload]:
    return _get(f"/v1/uploads/{_id(upload_id)}", Upload.from_dict)


def append(upload_id: str, offset: int, block: bytes) -> Call[None]:
    """Not repeatable as it is: after a cut the coordinator says how much arrived (flows.py)."""
    headers = {"Upload-Offset": str(offset), "Content-Type": OFFSET_STREAM}
    path = f"/v1/uploads/{_id(upload_id)}"
    return Call(method="PATCH", path=path, parse=_nothing, content=block, headers=headers, timeout_s=LONG_TIMEOUT_S)


def drop_upload(upload_id: str) -> Call[None]:
    return Call(method="DELETE", path=f"/v1/uploads/{_id(upload_id)}", parse=_nothing)


# ------------------------------------------------------------------ jobs
def submit_job(dataset_id: str, key: str | None, **options: Unpack[JobOptions]) -> Call[Job]:
    body = {"dataset_id": dataset_id, **_given(options)}
    return Call(
        method="POST", path="/v1/jobs", parse=Job.from_dict, json=body, headers=_key(key), repeatable=True, timeout_s=LONG_TIMEOUT_S
    )


def job(job_id: str) -> Call[Job]:
    return _get(f"/v1/jobs/{_id(job_id)}", Job.from_dict)


def jobs(cursor: str | None, **filters: Unpack[JobFilter]) -> Call[Page[Job]]:
    return _get("/v1/jobs", _page(Job), cursor=cursor, **filters)


def control(job_id: str, verb: str) -> Call[Job]:
    """``verb``: pause, resume or cancel; asking twice is asking once."""
    return Call(method="POST", path=f"/v1/jobs/{_id(job_id)}/{verb}", parse=Job.from_dict, repeatable=True)


def retry(job_id: str, codes: Sequence[str] | None, rows: Sequence[tuple[int, int]] | None = None) -> Call[Job]:
    body = {"codes": list(codes) if codes is not None else None, **_given({"rows": None if rows is None else [list(r) for r in rows]})}
    return Call(method="POST", path=f"/v1/jobs/{_id(job_id)}/retry", parse=Job.from_dict, json=body, timeout_s=LONG_TIMEOUT_S)


def delete_job(job_id: str, *, dry_run: bool) -> Call[Deleted]:
    path = f"/v1/jobs/{_id(job_id)}"
    return Call(
        method="DELETE", path=path, parse=Deleted.from_dict, params={"dry_run": dry_run}, repeatable=dry_run, timeout_s=LONG_TIMEOUT_S
    )


def errors(job_id: str, cursor: str | None, *, code: str | None) -> Call[Page[RowError]]:
    return _get(f"/v1/jobs/{_id(job_id)}/errors", _page(RowError), cursor=cursor, code=code, limit=1000)


def rows(job_id: str, cursor: str | None, *, state: str | None) -> Call[Page[Row]]:
    return _get(f"/v1/jobs/{_id(job_id)}/rows", _page(Row), cursor=cursor, state=state, limit=1000)


def ack(job_id: str, ranges: Sequence[tuple[int, int]]) -> Call[Acked]:
    body = {"rows": [list(r) for r in ranges]}
    path = f"/v1/jobs/{_id(job_id)}/acks"
    return Call(method="POST", path=path, parse=Acked.from_dict, json=body, repeatable=True, timeout_s=LONG_TIMEOUT_S)


def events(job_id: str, last_id: str) -> Call[None]:
    headers = {"Accept": EVENT_STREAM, "Cache-Control": "no-store", **({"Last-Event-ID": last_id} if last_id else {})}
    return Call(method="GET", path=f"/v1/jobs/{_id(job_id)}/events", parse=_nothing, headers=headers)


# ------------------------------------------------------------------ the service
def estimate(dataset_id: str, **options: Any) -> Call[Estimate]:
    body = {"dataset_id": dataset_id, **_given(options)}
    return Call(method="POST", path="/v1/estimate", parse=Estimate.from_dict, json=body, repeatable=True, timeout_s=LONG_TIMEOUT_S)


def store() -> Call[Store]:
    return _get("/v1/store", Store.from_dict)


def gc(*, dry_run: bool, older_than_s: float | None, states: Sequence[str] | None) -> Call[Collected]:
    body = {"dry_run": dry_run, **_given({"older_than_s": older_than_s, "states": list(states) if states is not None else None})}
    return Call(method="POST", path="/v1/gc", parse=Collected.from_dict, json=body, repeatable=dry_run, timeout_s=LONG_TIMEOUT_S)


def engines() -> Call[list[Engine]]:
    return _get("/v1/engines", lambda data: [Engine.from_dict(e) for e in data["items"]])


def health() -> Call[Health]:
    return _get("/healthz", Health.from_dict)


def ready() -> Call[Health]:
    return _get("/readyz", Health.from_dict)


def service() -> Call[Service]:
    return _get("/", Service.from_dict)
