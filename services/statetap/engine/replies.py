"""Hooks in SGLang's HTTP process: a reply whose request asked for capture waits for its tap file (or the error) and says so in
``meta_info["capture"]``.

Invariant: ``status: ok`` is never said before the file has its final name. A client that goes away, an abort or a passed
deadline leaves no file behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from ..contracts.capture import STATUS_ERROR, STATUS_OK, CaptureReply, lease_of
from ..contracts.errors import ErrorCode
from .channel import Outcomes
from .settings import current

logger = logging.getLogger(__name__)

DISCONNECT_POLL_S = 1.0
GONE = "gone"  # no reply was made: the client went away, or SGLang refused or ended the request itself

OUTCOMES: Outcomes | None = None
"""Set by the launcher in the main process before SGLang starts; None in every other process."""

RESULTS: Counter[str] = Counter()
"""Replies by result: ok, an error code, or gone. All in the event loop."""
_waited_s = 0.0


def metrics() -> dict[str, Any]:
    """This process's part of the engine's metrics (metrics.py)."""
    waiting = OUTCOMES.waiting if OUTCOMES is not None else 0
    return {"replies": dict(RESULTS), "reply_wait_seconds": round(_waited_s, 6), "replies_waiting": waiting}


def before_tokenize(manager: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse what could not be captured while refusing is still possible (ValueError is SGLang's HTTP 400)."""
    lease = lease_of(obj.rid)
    if lease is None:
        return
    folder = current().tap_dir / lease
    if not folder.is_dir():
        raise ValueError(f"capture: there is no lease folder {lease} in the tap")
    if (folder / f"{obj.rid}.safetensors").exists():
        raise ValueError(f"capture: rid {obj.rid} was used before and its states are still there")


def around_wait(original: Any, manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``TokenizerManager._wait_one_response`` looks its state up eagerly (0.5.23): call it at once, wrap what it returns."""
    inner = original(manager, obj, request, *args, **kwargs)
    if OUTCOMES is None or lease_of(obj.rid) is None:
        return inner
    return _wait_with_file(OUTCOMES, manager, obj, request, inner)


async def _wait_with_file(outcomes: Outcomes, manager: Any, obj: Any, request: Any, inner: Any) -> AsyncIterator[Any]:
    global _waited_s
    future = outcomes.expect(obj.rid)
    kept, result = False, GONE
    try:
        async for out in inner:
            reason = out["meta_info"].get("finish_reason")
            if reason is not None:
                loop = asyncio.get_running_loop()
                answered = loop.time()
                reply = await _outcome(future, request, reason)
                # SGLang looks for closed connections every 4 s, and not after the forward: a file that nobody was told of would stay.
                await _refuse_gone(request)
                held = loop.time() - answered
                _waited_s += held
                reply = {**reply, "held_s": round(held, 4)}
                out["meta_info"]["capture"] = reply
                # The HTTP server takes one item of a plain request's generator and drops it: no abort after this.
                kept = reply["status"] == STATUS_OK
                result = STATUS_OK if kept else reply["code"]
            yield out
    finally:
        outcomes.forget(obj.rid)
        RESULTS[result] += 1
        if not kept:  # aborted, gone, late or failed: the writer removes what there is
            _abort(manager, obj.rid)
        await inner.aclose()


async def _outcome(future: asyncio.Future[dict[str, Any]], request: Any, reason: Any) -> dict[str, Any]:
    if isinstance(reason, dict) and reason.get("type") == "abort":
        return CaptureReply(
            status=STATUS_ERROR, code=ErrorCode.CAPTURE_INCOMPLETE.value, message=f"aborted: {reason.get('message', '')}"
        ).to_dict()
    deadline = asyncio.get_running_loop().time() + current().deadline_s
    while True:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return CaptureReply(
                status=STATUS_ERROR, code=ErrorCode.CAPTURE_INCOMPLETE.value, message="the tap file was not there in time"
            ).to_dict()
        try:
            return await asyncio.wait_for(asyncio.shield(future), min(left, DISCONNECT_POLL_S))
        except TimeoutError:
            await _refuse_gone(request)


async def _refuse_gone(request: Any) -> None:
    if request is not None and await request.is_disconnected():
        raise ValueError("capture: the client is gone")


def _abort(manager: Any, rid: str) -> None:
    # manager.abort_request does nothing once the request's state is gone, so the message is sent as such.
    from sglang.srt.managers.io_struct import AbortReq

    message = AbortReq(rid=rid)
    if hasattr(manager, "_dispatch_to_scheduler"):
        manager._dispatch_to_scheduler(message)
    else:  # before 0.5.18
        manager.send_to_scheduler.send_pyobj(message)
