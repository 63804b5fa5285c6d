"""What the typed values of the chart are made of: kinds of values, sections, and JSON Schema's conditions.

Invariant: a section knows all of its values (a misspelt one is refused), and a number has a bound that Helm prints as a number.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

SIZE = "^[1-9][0-9]*(Mi|Gi|Ti)$"
Quantity = Annotated[str, Field(pattern=SIZE)]
"""Binary units only, so that the templates can add them up."""
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]
"""A Kubernetes name, or "" for none."""
FolderPath = Annotated[str, Field(pattern=r"^(/[^:]*)?$")]
Labels = dict[str, str]
Strings = dict[str, str]

CHART_SETS = {
    "coordinator": "REDIS_URL STORE DATA_DIR MODEL_DIRS ALLOW_REMOTE_CODE KEYS_FILE ALLOW_NO_AUTH METRICS_OPEN COOKIE_SECURE HOST PORT LOG_LEVEL SAMPLES",
    "ingest": "REDIS_URL STORE LOG_LEVEL",
    "worker": "REDIS_URL STORE TAP ENGINE_URL TAP_BYTES WORKERS_PER_ENGINE WINDOW REQUEST_TIMEOUT_S READY_TIMEOUT_S DRAIN_S WRITE_THREADS LOG_LEVEL",
    "engine": "ENGINE_RING_BYTES",
}
"""Service -> STATETAP_… variables that the templates set from values of their own."""


BUCKET = ["AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
"""Variables of coordinator and workers that come of store.samples."""


def env_field(service: str) -> Any:
    """A map of further variables; none that the chart sets itself (the object would have it twice)."""
    taken = [f"STATETAP_{n}" for n in CHART_SETS[service].split()] + [
        "HOME",
        "HF_HOME",
        "HF_TOKEN",
        "REDIS_PASSWORD",
        "POD_NAME",
        "PYTHONUNBUFFERED",
    ]
    taken += BUCKET if service in ("coordinator", "worker") else []
    names = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": taken}}
    return Field(
        default_factory=dict,
        description="Further environment variables (see settings.md); those that the chart sets are refused.",
        json_schema_extra={"propertyNames": names},
    )


def has(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has these properties, each valid."""
    return {"properties": properties, "required": list(properties)}


def when(condition: dict[str, Any], then: dict[str, Any], otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON Schema's if/then/else."""
    return {"if": condition, "then": then} | ({"else": otherwise} if otherwise else {})


def const(value: object) -> dict[str, Any]:
    return {"const": value}


NONEMPTY = {"minLength": 1}


class Section(BaseModel):
    """Every number has a bound below a million: Helm reads numbers as floats, and prints those from there on as 1e+06."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SecretKey(Section):
    name: Name = Field(default="", description="Name of a Secret that exists already.")
    key: str = Field(default="", description="Key in it.")


def secret(key: str, what: str) -> Any:
    return Field(default=SecretKey(key=key), description=what)
