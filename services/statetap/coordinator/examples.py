"""Examples of every request and answer in OpenAPI: whole ones from shown.py, the others put together from those of their fields.

Invariant: every body has one, also that of an operation that nobody thought of here, and each is valid by its schema (a test looks).
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ..contracts.errors import SPECS, ErrorCode
from .shown import SHOWN

JSON = "application/json"
PROBLEM = "application/problem+json"

# The code that an example of a status shows; of others the first one that has the status.
_TYPICAL = {
    403: ErrorCode.FORBIDDEN,
    404: ErrorCode.NOT_FOUND,
    409: ErrorCode.CONFLICT,
    422: ErrorCode.INVALID_REQUEST,
    500: ErrorCode.INTERNAL,
    503: ErrorCode.REDIS_UNAVAILABLE,
}


def fill(document: dict[str, Any]) -> None:
    """Give every JSON body and answer an example that has none."""
    schemas = document["components"]["schemas"]
    for operations in document["paths"].values():
        for operation in operations.values():
            for media, content in operation.get("requestBody", {}).get("content", {}).items():
                if media == JSON:
                    _give(content, schemas)
            for status, answer in operation.get("responses", {}).items():
                for media, content in answer.get("content", {}).items():
                    if media == PROBLEM:
                        content.setdefault("example", problem(int(status)))
                    elif media == JSON:
                        _give(content, schemas)


def problem(status: int) -> dict[str, Any]:
    """A problem with this status, as problems.py writes it."""
    code = _TYPICAL.get(status) or next((c for c, s in SPECS.items() if s.status == status), ErrorCode.INVALID_REQUEST)
    spec = SPECS[code]
    return {
        "type": f"urn:statetap:error:{code.value}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": "what is wrong, naming the place",
        "code": code.value,
        "retryable": spec.retryable,
        "next_step": spec.next_step,
    }


def _give(content: dict[str, Any], schemas: dict[str, Any]) -> None:
    if "example" not in content and "examples" not in content and "schema" in content:
        content["example"] = example(content["schema"], schemas)


def example(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """One value of a schema: its own example, else its default, else the simplest there is."""
    if "$ref" in schema:
        return example(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if schema.get("title") in SHOWN:
        return _completed(SHOWN[schema["title"]], schema, schemas)
    for key in ("const", "example", "default"):
        if key in schema and schema[key] is not None:
            return schema[key]
    if schema.get("examples"):
        return schema["examples"][0]
    if schema.get("enum"):
        return schema["enum"][0]
    if "default" in schema:
        return None
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema and "properties" not in schema:
            return example(schema[key][0], schemas)
    return _plain(schema, schemas)


def _plain(schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    match schema.get("type"):
        case "object":
            return {name: example(part, schemas) for name, part in schema.get("properties", {}).items() if _shown(name, part, schema)}
        case "array":
            return [example(schema["items"], schemas)] if schema.get("items") else []
        case "integer" | "number":
            return max(schema.get("minimum", 0), schema.get("exclusiveMinimum", -1) + 1)
        case "boolean":
            return False
        case "string":
            return "x" * schema.get("minLength", 0)
    return None


def _completed(shown: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> Any:
    """``shown`` with what its schema requires and it does not have: a field that was added since."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not isinstance(shown, dict) or "properties" not in schema:
        return shown
    parts = schema["properties"]
    whole = {name: _completed(value, parts[name], schemas) if name in parts else value for name, value in shown.items()}
    return whole | {name: example(parts[name], schemas) for name in schema.get("required", ()) if name not in shown}


def _shown(name: str, part: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Optional fields are shown where they have something to show."""
    return name in schema.get("required", ()) or bool(part.get("examples") or part.get("default"))
