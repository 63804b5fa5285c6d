"""Values that the shell completes: error codes, and jobs and datasets of a coordinator that answers at once.

Invariant: completing never prints, never fails and never takes longer than WAIT_S, whatever the coordinator does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import islice

import typer

from ..client import Client
from ..contracts.errors import ErrorCode, StatetapError

WAIT_S = 0.5
AT_MOST = 50


def complete_codes(incomplete: str) -> list[str]:
    return [c.value for c in ErrorCode if c.value.startswith(incomplete)]


def complete_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    return _within(ctx, incomplete, [_jobs])


def complete_datasets(ctx: typer.Context, incomplete: str) -> list[str]:
    return _within(ctx, incomplete, [_datasets])


def complete_both(ctx: typer.Context, incomplete: str) -> list[str]:
    return _within(
        ctx, incomplete, [ask for prefix, ask in (("job-", _jobs), ("ds-", _datasets)) if prefix.startswith(incomplete[: len(prefix)])]
    )


def _jobs(client: Client) -> list[str]:
    return [j.job_id for j in islice(client.jobs(), AT_MOST)]


def _datasets(client: Client) -> list[str]:
    return [d.dataset_id for d in islice(client.datasets(), AT_MOST)]


def _within(ctx: typer.Context, incomplete: str, asks: list[Callable[[Client], list[str]]]) -> list[str]:
    found: list[str] = []

    def look() -> None:
        try:
            with Client(ctx.params.get("url"), patience_s=0) as client:
                for ask in asks:
                    found.extend(ask(client))
        except StatetapError:
            return  # nothing to offer

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return [name for name in list(found) if name.startswith(incomplete)]
