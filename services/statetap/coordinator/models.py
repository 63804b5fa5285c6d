"""Requests and answers of the API, version 1. Field descriptions here are the reference (OpenAPI)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..contracts.records import DatasetState, JobState

Format = Literal["auto", "messages", "sharegpt", "tokenized"]


class Strict(BaseModel):
    """A request: an unknown field is an error, so that a typing mistake is not silently ignored."""

    model_config = ConfigDict(extra="forbid")


class DatasetOptions(Strict):
    name: str = Field(default="", max_length=200, description="A name for people. Default: the file's name.")
    format: Format = Field(default="auto", description="What the rows are; `auto` decides by the first good row.")
    tokenizer: str | None = Field(
        default=None,
        max_length=1000,
        description="Model folder or hub id of the tokenizer. Default: the model of the live capture profile, if there is exactly one.",
    )
    max_length: int = Field(default=0, ge=0, le=1 << 31, description="Longest row in tokens; 0: no limit.")
    truncate: bool = Field(default=False, description="Cut longer rows at max_length rather than reject them.")
    trust_remote_code: bool = Field(default=False, description="Run the tokenizer's own code.")


class DatasetByPath(DatasetOptions):
    """A file that lies below the coordinator's data folder."""

    path: str = Field(min_length=1, max_length=4096, description="Path of the source file.", examples=["/data/conversations.jsonl"])


class Dataset(BaseModel):
    dataset_id: str = Field(examples=["ds-4f1c0a9be2d37586"])
    name: str
    state: DatasetState
    format: str
    tokenizer: str
    rows: int = Field(description="Source rows seen so far, good or bad.")
    accepted: int = Field(description="Rows that a job would prefill.")
    rejected: int = Field(description="Rows with an error code; a job skips them.")
    tokens: int
    supervised_tokens: int = Field(description="Tokens whose loss mask is 1.")
    max_tokens: int = Field(description="Tokens of the longest row.")
    bytes_read: int
    bytes_total: int
    errors: dict[str, int] = Field(description="Error code -> rows.")
    examples: list[dict[str, Any]] = Field(description="The first bad rows: row, line, code, message.")
    content_hash: str
    error: dict[str, str] | None = Field(description="Code and message when the state is failed.")
    created_at: float = Field(description="Unix time.")
    updated_at: float


class DatasetList(BaseModel):
    items: list[Dataset]
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null on the last.")


class JobRequest(Strict):
    dataset_id: str = Field(max_length=64, examples=["ds-4f1c0a9be2d37586"])
    name: str = Field(default="", max_length=200, description="A name for people. Default: the dataset's name.")
    profile_id: str | None = Field(default=None, max_length=64, description="Capture profile. Default: the only live one.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Jobs of higher priority are given out first.")
    max_failed: int = Field(default=0, ge=0, description="Failed rows that the submitter still takes as a success (exit code of the CLI).")
    wait_for_engine: bool = Field(default=False, description="Accept a profile that an earlier job had and that no live engine serves now.")
    force: bool = Field(default=False, description="Accept though the store has not the space.")


class Rows(BaseModel):
    """done + failed + skipped + open = total, always."""

    total: int
    done: int
    failed: int = Field(description="Attempted, and given up.")
    skipped: int = Field(description="Never sent: the row itself does not allow it.")
    open: int


class Tokens(BaseModel):
    total: int = Field(description="Of all rows that can be prefilled.")
    done: int


class Bytes(BaseModel):
    expected: int = Field(description="Exact bytes of the files if every row that can be prefilled is done.")
    committed: int


class Rates(BaseModel):
    """Over the last 30 s, of rows really done."""

    rows_per_s: float
    tokens_per_s: float
    bytes_per_s: float


class Batches(BaseModel):
    total: int
    finished: int
    outstanding: int = Field(description="Given out and not handed back.")


class Job(BaseModel):
    job_id: str = Field(examples=["job-9d2c61f0a7b3e845"])
    name: str
    dataset_id: str
    profile_id: str
    priority: int
    max_failed: int
    state: JobState
    reason: str = Field(description="Why it is paused or failed: a pause reason or an error code.")
    message: str
    control: Literal["run", "pause", "cancel"] = Field(
        description="What was asked for; a cancelled job ends when nobody works on it any more."
    )
    rows: Rows
    tokens: Tokens
    bytes: Bytes
    errors: dict[str, int] = Field(description="Error code -> rows, failed and skipped.")
    rates: Rates
    eta_s: float | None = Field(description="Seconds left, by tokens; null when unknown.")
    batches: Batches
    created_at: float = Field(description="Unix time.")
    started_at: float | None
    ended_at: float | None
    path: str = Field(description="The job's folder, as the coordinator sees it.")


class JobList(BaseModel):
    items: list[Job]
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null on the last.")


class RowError(BaseModel):
    row: int = Field(description="0-based position in the source.")
    line: int | None = Field(description="1-based line (JSONL) or element (JSON array) of the source.")
    source_id: str | None
    state: Literal["failed", "skipped"]
    code: str
    message: str
    retryable: bool
    next_step: str
    generation: int


class RowErrorList(BaseModel):
    items: list[RowError] = Field(description="May be fewer than `limit`, even none, before the last page.")
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null on the last.")


class Engine(BaseModel):
    engine_id: str
    url: str
    profile_id: str
    profile: dict[str, Any]
    workers: int
    worker_ids: list[str]
    tap_bytes: int
    healthy: bool
    self_check: dict[str, Any]
    registered_at: float


class EngineList(BaseModel):
    items: list[Engine]


class Health(BaseModel):
    status: Literal["ok"]


class Root(BaseModel):
    service: Literal["statetap"]
    version: str
    links: dict[str, str]
