"""Settings of a worker, one model. Every field is an environment variable ``STATETAP_<NAME>``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class WorkerSettings(BaseSettings):
    """Read once at start; the horses inherit it. A wrong value ends the process with a message that names it."""

    model_config = SettingsConfigDict(env_prefix="STATETAP_", env_ignore_empty=True)

    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"), description="Redis: redis://[:password@]host:port/db or unix://path. Never logged."
    )
    store: Path = Field(default=Path("store"), description="Root folder of the store: datasets and jobs lie below it.")
    tap: Path = Field(default=Path("tap"), description="Tap folder that this worker shares with its engine; in memory (tmpfs).")
    engine_url: str = Field(default="http://127.0.0.1:30000", description="Where the engine beside this worker answers.")
    tap_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of the tap that all workers of the engine may fill; 0: 80 % of what its file system has free at the start.",
    )
    workers_per_engine: int = Field(
        default=2, ge=1, description="Workers beside one engine; each takes its share of the tap. Two, so that one fills while one drains."
    )
    window: int = Field(default=32, ge=1, description="Prefills in flight a worker: enough to keep the engine's prefill batch full.")
    request_timeout_s: float = Field(default=300.0, gt=0, description="Seconds after which a prefill is given up and tried again.")
    circuit_failures: int = Field(
        default=20, ge=0, description="Rows that fail one after another with one cause before the job is paused as circuit_open; 0: never."
    )
    row_attempts: int = Field(default=3, ge=1, description="Prefills of a row before it is recorded as failed.")
    engine_down_after_s: float = Field(
        default=10.0, gt=0, description="Seconds without an answer of the engine after which the job is paused as engine_down."
    )
    ready_timeout_s: float = Field(default=3600.0, gt=0, description="Seconds to wait for the engine's READY.json at the start.")
    drain_s: float = Field(
        default=20.0, gt=0, description="Seconds after SIGTERM in which prefills in flight may end; then they are aborted and stay open."
    )
    write_threads: int = Field(
        default=2, ge=1, description="Threads that check and write samples: one checks while one writes; more only wait for the disk."
    )
    put_threads: int = Field(
        default=8, ge=1, description="Threads that check samples and put them into a bucket, each waiting for one PUT at a time."
    )
    put_bytes: int = Field(
        default=1 << 30,
        ge=1,
        description="Bytes of samples that a worker holds in memory on their way into a bucket; one that is longer goes alone.",
    )
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Least level of events that are logged.")
