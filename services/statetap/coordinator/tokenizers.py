"""Which tokenizer the API may name: what loads one reads files of this host, and may run code.

Invariant: a hub id never reads a folder; a folder lies, links resolved, below a root that the operator named, and so does every file in
it: the caches of Hugging Face are links into ``blobs/`` beside them, which is fine, a link out of the root is not. Nothing is said of
what lies elsewhere, not even whether it exists. Who can write below a root can still change it after this look; such a person is on
this host already.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from ..contracts.errors import ErrorCode, RequestError
from .auth import Caller
from .settings import CoordinatorSettings

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
MAX_FILES = 10_000  # a folder of more is no model's


def allowed_tokenizer(name: str, caller: Caller, settings: CoordinatorSettings, live: Collection[str]) -> str:
    """The tokenizer as ingestion loads it: a hub id as it is, a folder resolved. ``live``: models of live engines, which may be named as
    they are.

    Raises:
        RequestError: ``path_not_allowed`` or ``invalid_request``, field ``tokenizer``.
    """
    if not name or name in live or HUB_ID.fullmatch(name):
        return name
    path = Path(name)
    if "\0" in name or not path.is_absolute():
        message = f"tokenizer: {name!r} is neither a hub id (name or owner/name) nor an absolute path"
        raise RequestError(ErrorCode.INVALID_REQUEST, message, field="tokenizer")
    roots = [p.resolve() for p in (settings.data_dir, settings.store, *settings.model_dirs) if p is not None]
    try:
        folder = path.resolve()
        if settings.allow_any_path or caller.trusted:
            return name
        root = next((r for r in roots if folder.is_relative_to(r)), None)
        if root is None:
            raise _not_allowed(f"{name!r} is below none of the folders that tokenizers may come from")
        if not folder.is_dir():
            raise RequestError(ErrorCode.INVALID_REQUEST, f"tokenizer: no folder at {name!r}", field="tokenizer")
        _contained(name, folder, root)
    except (OSError, RuntimeError) as e:  # a loop of links, a name that is too long
        why = e.strerror if isinstance(e, OSError) else "a loop of links"
        raise RequestError(ErrorCode.INVALID_REQUEST, f"tokenizer: {name!r}: {why}", field="tokenizer") from e
    return str(folder)


def check_remote_code(wanted: bool, caller: Caller, settings: CoordinatorSettings) -> None:
    """Raises RequestError ``forbidden`` where running a tokenizer's own code was asked for and nobody allowed it."""
    if wanted and not (settings.allow_remote_code or caller.trusted):
        raise RequestError(
            ErrorCode.FORBIDDEN,
            "trust_remote_code: needs a key with scope admin, or STATETAP_ALLOW_REMOTE_CODE=true on the coordinator",
            field="trust_remote_code",
        )


def _contained(name: str, folder: Path, root: Path) -> None:
    """All that ``folder`` holds lies below ``root``."""
    seen, todo, files = {folder}, [folder], 0
    while todo:
        for entry in os.scandir(here := todo.pop()):
            files += 1
            if files > MAX_FILES:
                raise _not_allowed(f"{name!r} holds more than {MAX_FILES} files, which no tokenizer does")
            path = here / entry.name
            if entry.is_symlink():
                path = path.resolve()
                if not path.is_relative_to(root):
                    raise _not_allowed(f"{name!r}: {entry.name!r} in it leads out of the folder that tokenizers may come from")
            if path not in seen and path.is_dir():
                seen.add(path)
                todo.append(path)


def _not_allowed(message: str) -> RequestError:
    return RequestError(ErrorCode.PATH_NOT_ALLOWED, f"tokenizer: {message}", field="tokenizer")
