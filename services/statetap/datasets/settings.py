"""Settings of the ingestion process, from the environment (prefix ``STATETAP_``)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Read once at the start of the process and once a task."""

    model_config = SettingsConfigDict(env_prefix="STATETAP_", extra="ignore")

    redis_url: SecretStr = Field(
        default=SecretStr("redis://localhost:6379/0"),
        description="Redis of this installation, redis://… or unix://…; a password stands in the URL and is never logged.",
    )
    store: Path = Field(default=Path("/store"), description="Root folder of the store; datasets lie under datasets/ in it.")
    max_row_bytes: int = Field(
        default=64 << 20,
        ge=1024,
        description="Longest row of a source file in bytes, as it is written; a longer one is a bad_row and is never held.",
    )
    max_row_tokens: int = Field(default=1 << 24, ge=1, description="Longest row in tokens that is kept; a longer one is prompt_too_long.")
    log_level: str = Field(default="INFO", description="Least level that is logged: DEBUG, INFO, WARNING or ERROR.")
