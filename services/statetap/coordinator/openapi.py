"""What holds of all operations, put into OpenAPI in one place: who may call them, and the refusals that come before any route.

Invariant: the document says what auth.py and limits.py do, because it asks them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from . import examples, models
from .auth import scope_of
from .problems import responses
from .sessions import COOKIE

SCHEMES: dict[str, Any] = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key: `Authorization: Bearer st_…`. `statetap keys add` makes one."},
    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "The page's login: POST /v1/session."},
}
SCOPE = "x-statetap-scope"
NAMED: tuple[type[BaseModel], ...] = (models.Source,)  # by bodies that FastAPI does not make itself
_METHODS = ("get", "head", "post", "put", "patch", "delete")


def install(app: FastAPI) -> None:
    """Complete the document that FastAPI makes; it is made once."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete(made())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def complete(document: dict[str, Any]) -> None:
    """Add security schemes, each operation's scope and what AuthMiddleware and BodyLimit answer."""
    components = document.setdefault("components", {})
    components.setdefault("securitySchemes", {}).update(SCHEMES)
    for model in NAMED:
        components.setdefault("schemas", {}).setdefault(model.__name__, model.model_json_schema())
    for path, operations in document["paths"].items():
        for method in _METHODS:
            operation = operations.get(method)
            if operation is None:
                continue
            answers = [403]  # a Host or an Origin that is not ours
            scope = scope_of(method.upper(), path)
            if scope is not None:
                answers += [401, 429]
                operation["security"] = [{name: []} for name in SCHEMES]
                operation[SCOPE] = scope.label
            if "requestBody" in operation:
                answers.append(413)
            for status, declared in _problems(*answers).items():
                operation["responses"].setdefault(status, declared)
    examples.fill(document)


def _problems(*statuses: int) -> dict[str, Any]:
    """As FastAPI writes them: without the model, which only names the schema."""
    found = responses(*statuses)
    return {str(s): {k: v for k, v in found[s].items() if k != "model"} for s in statuses}
