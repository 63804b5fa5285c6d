"""Requests and answers of the API that are about the store's space: estimates, deletion, clean-up, acknowledgements."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from ..contracts.positions import ALL
from ..contracts.records import JobState
from ..contracts.sample_format import Encoding
from .models import Boundaries, EncodingField, PositionsField, Strict


class EstimateRequest(Strict):
    dataset_id: str = Field(max_length=64, examples=["ds-4f1c0a9be2d37586"])
    profile_id: str | None = Field(default=None, max_length=64, description="Capture profile. Default: the only live one.")
    rows: int | None = Field(default=None, ge=1, description="Only the first rows of the dataset.")
    max_length: int | None = Field(default=None, ge=1, description="Longer rows would be skipped.")
    boundaries: Boundaries = None
    encoding: EncodingField = Encoding.RAW
    positions: PositionsField = ALL


class Alternative(BaseModel):
    """A change of the request that would fit, or may."""

    change: str = Field(description="In words.", examples=["the first 21,000 rows"])
    field: Literal["rows", "max_length", "encoding"] = Field(description="The field of the job to set.")
    value: int | str
    rows: int = Field(description="Rows that would be prefilled.")
    tokens: int
    bytes: int
    exact: bool = Field(description="False: `bytes` is an upper bound (zstd).")
    fits: bool = Field(description="False: its upper bound does not, and what it will be is known afterwards only; `force` accepts it.")
    expected_bytes: int | None = Field(default=None, description="Of zstd: by what an earlier job of these states took.")


class Estimate(BaseModel):
    """What a job would need. Bytes are exact where every row is done and none is reused, and the encoding is not zstd."""

    rows: int
    accepted: int = Field(description="Rows that would be prefilled.")
    tokens: int
    bytes: int
    exact: bool = Field(description="False: `bytes` is an upper bound (zstd).")
    expected_bytes: int | None = Field(description="Of zstd: by what an earlier job of these states took; null when there is none.")
    free: int = Field(description="Free bytes of the store.")
    reserved: int = Field(description="Of them: what jobs that have not ended still need.")
    kept_free: int = Field(description="Of them: what stays free always.")
    fits: bool
    missing: int = Field(description="Bytes that are missing; 0 when it fits.")
    alternatives: list[Alternative] = Field(description="What would fit, when it does not.")
    tokens_per_s: float | None = Field(description="Speed that the profile's jobs have now; null when none runs.")
    hours: float | None = Field(description="By that speed, were it the only job; null when it is not known.")


class Store(BaseModel):
    """Bytes of the file system that the store stands on."""

    free: int = Field(examples=[3_200_000_000_000])
    reserved: int = Field(description="Of them: what jobs that have not ended still need, at most.", examples=[1_100_000_000_000])
    kept_free: int = Field(description="Of them: what stays free always; below it jobs pause as `low_disk`.", examples=[1_073_741_824])
    samples: str | None = Field(description="s3://… where new jobs put their samples; null: on the store.", examples=[None])


class Deleted(BaseModel):
    deleted: bool
    dry_run: bool
    files: int
    bytes: int = Field(description="Freed: files that another job shares by hard link do not count.")


class GcRequest(Strict):
    dry_run: bool = Field(default=True, description="Only say what would be freed.")
    older_than_s: float = Field(default=0.0, ge=0, description="Jobs have to have ended so many seconds ago.", examples=[604800.0])
    states: list[Literal[JobState.COMPLETED, JobState.COMPLETED_WITH_ERRORS, JobState.CANCELLED, JobState.FAILED]] = Field(
        default_factory=list, max_length=4, description="Ended states whose jobs are deleted whole; none: no job is."
    )


class Collected(BaseModel):
    kind: Literal["trash", "job", "unnamed_files"]
    name: str
    files: int
    bytes: int


class Gc(BaseModel):
    dry_run: bool
    files: int
    bytes: int
    items: list[Collected]


class AckRequest(Strict):
    rows: list[tuple[int, int]] = Field(
        min_length=1, max_length=10_000, description="Half-open ranges of rows that were read.", examples=[[[0, 2000], [2000, 2048]]]
    )


class Acked(BaseModel):
    rows: int = Field(description="Rows freed by this request.")
    bytes_freed: int
