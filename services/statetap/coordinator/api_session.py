"""/v1/session: the page's login. A key goes in once, a cookie that a script cannot read comes out."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, SecretStr

from .auth import Asking, Guard
from .keyfile import SCOPES
from .models import Strict
from .problems import responses
from .sessions import COOKIE

router = APIRouter(prefix="/v1/session", tags=["session"])


class Login(Strict):
    key: SecretStr = Field(
        min_length=1, max_length=200, description="An API key.", examples=["st_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"]
    )


class Session(BaseModel):
    name: str = Field(description="The key's name; empty where this coordinator has no keys.", examples=["alice"])
    scope: str = Field(description=f"What it may do: {', '.join(SCOPES)}; each includes the ones before it.", examples=["write"])
    expires_at: float | None = Field(description="Unix time at which the session ends; null when the request came with a key itself.")


@router.post("", summary="Log in: a session cookie for a key", responses=responses(401, 403, 409, 422, 429))
async def log_in(body: Login, request: Request, response: Response) -> Session:
    """The cookie ends with the key, after STATETAP_SESSION_S, or by DELETE. Wrong keys are slowed down."""
    guard: Guard = request.app.state.guard
    key, token, ends = await guard.login(request, body.key.get_secret_value())
    settings = request.app.state.context.settings
    response.set_cookie(COOKIE, token, max_age=int(settings.session_s), path="/", httponly=True, samesite="strict", secure=_secure(request))
    response.headers["Cache-Control"] = "no-store"
    return Session(name=key.name, scope=key.scope.label, expires_at=ends)


@router.get("", summary="Who I am", responses=responses())
async def who_am_i(caller: Asking) -> Session:
    """The key that this request was made with, by itself or by a session."""
    return Session(name=caller.name, scope=caller.scope.label, expires_at=caller.session_ends)


@router.delete("", status_code=204, summary="Log out: the session's cookie is cleared", responses=responses(403))
async def log_out(request: Request) -> Response:
    """Nothing is left in the browser; the key itself stays valid."""
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict", secure=_secure(request))
    return response


def _secure(request: Request) -> bool:
    return request.url.scheme == "https" or bool(request.app.state.context.settings.cookie_secure)
