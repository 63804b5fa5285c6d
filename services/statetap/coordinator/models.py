"""Requests and answers of the API, version 1. Field descriptions here are the reference (OpenAPI)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..contracts.positions import ALL, PATTERN
from ..contracts.records import DatasetState, JobState, Retain
from ..contracts.sample_format import Encoding

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
    shuffle: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 63,
        description="Seed by which all rows are permuted, the same on every machine. Default: their order stays.",
    )


class Source(Strict):
    """A file that lies below the coordinator's data folder, or a finished upload."""

    path: str | None = Field(
        default=None, min_length=1, max_length=4096, description="Path of the source file.", examples=["/data/conversations.jsonl"]
    )
    upload_id: str | None = Field(default=None, max_length=64, description="A finished upload (POST /v1/uploads), which is used up.")

    @model_validator(mode="after")
    def _one(self) -> Source:
        if (self.path is None) == (self.upload_id is None):
            raise ValueError("name one of path and upload_id")
        return self


class DatasetRequest(DatasetOptions):
    """One source (`path` or `upload_id`), or several, merged in order (`sources`)."""

    path: str | None = Field(
        default=None, min_length=1, max_length=4096, description="Path of the source file.", examples=["/data/conversations.jsonl"]
    )
    upload_id: str | None = Field(default=None, max_length=64, description="A finished upload (POST /v1/uploads), which is used up.")
    sources: list[Source] | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="Files that are merged in this order.",
        examples=[[{"path": "/data/chat.jsonl"}, {"upload_id": "up-0b9f3c52d5a84f0f9b1f6a7c8d9e0f11"}]],
    )

    @model_validator(mode="after")
    def _one_source(self) -> DatasetRequest:
        if sum(s is not None for s in (self.path, self.upload_id, self.sources)) != 1:
            raise ValueError("name the source: one of path, upload_id and sources")
        uploads = [s.upload_id for s in self.sources or () if s.upload_id is not None]
        if len(uploads) != len(set(uploads)):
            raise ValueError("sources: an upload is named twice, and it is used up once")
        return self


class UploadRequest(Strict):
    filename: str = Field(min_length=1, max_length=255, description="The file's name; its ending says the format.", examples=["data.jsonl"])
    size: int = Field(ge=1, le=1 << 62, description="Bytes of the whole file.", examples=[10_737_418_240])


class Upload(BaseModel):
    upload_id: str = Field(examples=["up-0b9f3c52d5a84f0f9b1f6a7c8d9e0f11"])
    filename: str = Field(examples=["data.jsonl"])
    size: int = Field(description="Bytes of the whole file.", examples=[10_737_418_240])
    offset: int = Field(description="Bytes that are safe on the store: the next piece begins here.", examples=[67_108_864])
    expires_at: float = Field(description="Unix time at which it is removed, unless more arrives before.", examples=[1764512345.0])


class Dataset(BaseModel):
    dataset_id: str = Field(examples=["ds-4f1c0a9be2d37586"])
    name: str
    state: DatasetState
    format: str
    tokenizer: str
    sources: list[str] = Field(description="Of a merged dataset: its files, each by as much of its path as tells them apart.")
    shuffle_seed: int | None = Field(description="Seed by which the rows were permuted; null: they stand in the order of the sources.")
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


Boundaries = Annotated[
    list[int] | None,
    Field(
        min_length=1,
        max_length=1000,
        description="Keep only these of the boundaries that the engine captures, in this order. Default: all of them.",
        examples=[[2, 18, 33]],
    ),
]
EncodingField = Annotated[
    Encoding,
    Field(
        description="How states are kept: `raw` as captured; `fp8` as float8_e4m3fn with a scale a token and boundary (half the bytes of bfloat16, "
        "lossy); `zstd` compressed without loss, by how much is known afterwards only."
    ),
]
PositionsField = Annotated[
    str,
    Field(
        pattern=PATTERN,
        description="Keep the states of these positions only: `all`; `loss_mask` (t where mask[t] or mask[t-1] is 1); `last:N`. Ids and mask stay "
        "whole; trainers' formats want `all`.",
        examples=["all", "loss_mask", "last:16"],
    ),
]


class JobRequest(Strict):
    dataset_id: str = Field(max_length=64, examples=["ds-4f1c0a9be2d37586"])
    name: str = Field(default="", max_length=200, description="A name for people. Default: the dataset's name.")
    profile_id: str | None = Field(default=None, max_length=64, description="Capture profile. Default: the only live one.")
    priority: int = Field(default=0, ge=-1000, le=1000, description="Jobs of higher priority are given out first.")
    max_failed: int = Field(default=0, ge=0, description="Failed rows that the submitter still takes as a success (exit code of the CLI).")
    wait_for_engine: bool = Field(default=False, description="Accept a profile that an earlier job had and that no live engine serves now.")
    force: bool = Field(default=False, description="Accept though the store has not the space.")
    rows: int | None = Field(default=None, ge=1, description="Only the first rows of the dataset. Default: all.")
    max_length: int | None = Field(default=None, ge=1, description="Rows of more tokens are skipped. Default: what the engine takes.")
    boundaries: Boundaries = None
    encoding: EncodingField = Encoding.RAW
    positions: PositionsField = ALL
    reuse: bool = Field(
        default=True,
        description="Take rows with equal tokens, mask, profile, boundaries, positions and encoding from earlier jobs by hard link, without a prefill.",
    )
    retain: Retain = Field(
        default=Retain.ALL,
        description="`until_read`: files are freed when a reader acknowledges them, and the job pauses as `store_full` at `retain_bytes`.",
    )
    retain_bytes: int = Field(default=0, ge=0, description="With `until_read`: bytes that may wait to be read.")

    @model_validator(mode="after")
    def _retains(self) -> JobRequest:
        if (self.retain == Retain.UNTIL_READ) != (self.retain_bytes > 0):
            raise ValueError("retain_bytes: give it with retain=until_read, and only then")
        return self


class Rows(BaseModel):
    """done + failed + skipped + open = total, always."""

    total: int
    done: int
    reused: int = Field(description="Of the done rows: taken from earlier jobs by hard link.")
    failed: int = Field(description="Attempted, and given up.")
    skipped: int = Field(description="Never sent: the row itself does not allow it.")
    open: int


class Tokens(BaseModel):
    total: int = Field(description="Of all rows that can be prefilled.")
    done: int


class Bytes(BaseModel):
    expected: int = Field(description="Of the files if every row that can be prefilled is done: exact, but an upper bound for `zstd`.")
    committed: int
    freed: int = Field(description="Of the committed: freed when they were read (`retain: until_read`).")


class Rates(BaseModel):
    """Over the last 30 s, of rows really done."""

    rows_per_s: float
    tokens_per_s: float
    bytes_per_s: float


class Batches(BaseModel):
    total: int
    finished: int
    outstanding: int = Field(description="Given out and not handed back.")


class CapturedBy(BaseModel):
    """One start of an engine, and the rows that it captured."""

    engine_id: str = Field(examples=["gpu-host-0"])
    boot_id: str = Field(description="Of this start; the manifest's column `engine` has it for each row.", examples=["5f0c3a9b1d2e4f67"])
    sglang_version: str = Field(examples=["0.5.23"])
    plugin_version: str = Field(description="Statetap's, in the engine.", examples=["0.1.0"])
    rows: int = Field(description="Done rows that it captured.", examples=[37309])


class Job(BaseModel):
    job_id: str = Field(examples=["job-9d2c61f0a7b3e845"])
    name: str
    dataset_id: str
    profile_id: str
    boundaries: list[int] = Field(description="That are kept, in file order.")
    encoding: Encoding
    positions: str = Field(description="Whose states are kept.")
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
    bound: Literal["", "prefill", "d2h", "tap", "commit", "no_engine"] = Field(
        description="What holds the job up now: the engine's prefills, its copies to the tap (d2h), space in the tap, check and commit, or that there is "
        "no engine; empty when nothing does or nothing is known."
    )
    batches: Batches
    created_at: float = Field(description="Unix time.")
    started_at: float | None
    ended_at: float | None
    path: str = Field(description="The job's folder, as the coordinator sees it.")
    samples: str | None = Field(default=None, description="s3://… of its sample files; null: they stand in its folder.")
    engines: list[CapturedBy] = Field(description="Whose rows these are, of a job that completed; reused rows are of none.")
    version: int = Field(description="Grows whenever this snapshot changed and never goes back: of two, the higher is the newer.")


class JobList(BaseModel):
    items: list[Job]
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null on the last.")


class Row(BaseModel):
    row: int = Field(description="0-based position in the source.", examples=[17])
    state: Literal["done", "failed", "skipped", "open"] = Field(description="Open: it has no outcome yet.", examples=["done"])
    generation: int = Field(default=0, description="Grows with each retry of the row.", examples=[0])
    tokens: int = Field(default=0, description="Of a done row.", examples=[412])
    bytes: int = Field(default=0, description="Of its file.", examples=[25_296_896])
    path: str = Field(default="", description="Of its file, below the job's folder.", examples=["rows_0-2000/data_17.safetensors"])
    xxh3: str = Field(default="", description="xxh3-64 of the whole file.", examples=["9f1c4be2d3758604"])
    code: str = Field(default="", description="Error code of a failed or skipped row.", examples=[""])
    message: str = Field(default="", examples=[""])
    origin: str = Field(
        default="", description="`<job>/<row>` that the file was captured for, when it was taken from there.", examples=[""]
    )
    at: float = Field(default=0.0, description="Unix time of the outcome; 0 for an open row.", examples=[1764512345.0])


class RowList(BaseModel):
    items: list[Row] = Field(description="May be fewer than `limit`, even none, before the last page.")
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null on the last.", examples=["17"])


class RowError(BaseModel):
    row: int = Field(description="0-based position in the source.")
    line: int | None = Field(description="1-based line (JSONL) or element (JSON array) of the source.")
    file: str | None = Field(description="Of a merged dataset: the file that the line is in.")
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
