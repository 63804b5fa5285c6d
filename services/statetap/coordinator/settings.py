"""Settings of the coordinator, one model. Every field is an environment variable ``STATETAP_<NAME>``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

GIB = 1 << 30


class CoordinatorSettings(BaseSettings):
    """Read once at start; a wrong value ends the process with a message that names it."""

    model_config = SettingsConfigDict(env_prefix="STATETAP_", env_ignore_empty=True)

    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"), description="Redis: redis://[:password@]host:port/db or unix://path. Never logged."
    )
    store: Path = Field(default=Path("store"), description="Root folder of the store: datasets and jobs lie below it.")
    data_dir: Path | None = Field(
        default=None, description="Folder below which dataset paths may lie, symbolic links resolved. Unset: datasets by path are refused."
    )
    allow_any_path: bool = Field(
        default=False,
        description="Accept a dataset path anywhere on this host. Only for the single-host CLI, where caller and host are one.",
    )
    model_dirs: Annotated[tuple[Path, ...], NoDecode] = Field(
        default=(),
        description="Folders, separated by colons, below which tokenizers named by path may lie, beside the data folder and the store.",
    )
    allow_remote_code: bool = Field(
        default=False, description="Let anyone who may submit a dataset run its tokenizer's own code. Without it that takes an admin key."
    )
    keys_file: Path | None = Field(
        default=None,
        description="File of the API keys (`statetap keys`); read again when it changes. Unset: no authentication, on loopback only.",
    )
    allow_no_auth: bool = Field(
        default=False,
        description="Serve a network without keys: everybody who reaches it may do everything. For one that is closed by other means.",
    )
    metrics_open: bool = Field(default=False, description="Answer /metrics without a key.")
    cookie_secure: bool = Field(
        default=False,
        description="Mark the page's cookie Secure though the request came by http (TLS ends at a proxy that does not say so).",
    )
    session_s: float = Field(default=43_200.0, gt=0, description="Seconds after which a login of the page ends.")
    max_json_bytes: int = Field(default=1 << 20, ge=1024, description="Longest request body that is not an upload, in bytes.")
    host: str = Field(default="127.0.0.1", description="Address that the API listens on. Anything but loopback needs keys_file.")
    published: str = Field(
        default="",
        description="Address at which a container's port is published, where host is the container's own: by it is judged whether keys are "
        "needed. Unset: host.",
    )
    port: int = Field(default=8700, ge=0, le=65535, description="Port that the API listens on; 0 takes a free one.")
    port_file: Path | None = Field(default=None, description="File that the bound port is written to, atomically, once the API listens.")
    tick_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between two looks of the reconciler.")
    requeue_after_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds after which a batch that was given out, has not started and left its queue is given out again.",
    )
    rate_window_s: float = Field(default=30.0, gt=0, description="Seconds of work over which rates and the ETA are computed.")
    min_free_bytes: int = Field(
        default=0,
        ge=0,
        description="Free bytes of the store below which jobs pause as low_disk. 0: 1 GiB, or 2 % of the file system where that is less.",
    )
    samples: str = Field(
        default="",
        pattern=r"^(s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#]*)?)?$",
        description="s3://bucket or s3://bucket/prefix for the sample files of new jobs, below their ids; credentials, region and endpoint by "
        "AWS_*. Unset: below the job's folder in the store.",
    )
    max_upload_bytes: int = Field(
        default=0, ge=0, description="Largest file that is accepted as an upload, in bytes. 0: what the store has free."
    )
    upload_ttl_s: float = Field(
        default=86_400.0, gt=0, description="Seconds without progress after which an upload that was not finished is removed."
    )
    idempotency_ttl_s: float = Field(default=86_400.0, gt=0, description="Seconds for which an Idempotency-Key is remembered.")
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Least level of events that are logged.")

    @field_validator("model_dirs", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(p for p in value.split(os.pathsep) if p) if isinstance(value, str) else value
