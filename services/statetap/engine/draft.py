"""Boundaries as they were asked for, checked against the model's config.json before anything starts.

Invariant: no process is started, and no weight read, for boundaries that the model does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..contracts.boundaries import parse_boundaries
from ..contracts.drafts import draft_boundaries
from ..contracts.errors import ErrorCode, RequestError


def resolve_boundaries(boundaries: str, draft_config: Path | None, model: str) -> str:
    """``boundaries`` as given, or those of a drafter's config, comma-separated.

    A hub id's config is fetched only where a draft config asks for it; without one its boundaries are checked when the model is loaded.

    Raises:
        RequestError: ``not_found`` for a file that is not there; ``invalid_request`` for boundaries out of range or named twice, a config
            that tells no convention, or ``--boundaries`` beside ``--draft-config``.
    """
    if draft_config is not None and boundaries != "default":
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            "--boundaries and --draft-config were both given",
            next_step="Give one of them: both name the boundaries.",
        )
    target = _target(model, fetch=draft_config is not None)
    if draft_config is not None:
        found = draft_boundaries(_read(draft_config), _layers(target, model), target=str(target.get("model_type", "")))
        return ",".join(map(str, found))
    if isinstance(target.get("num_hidden_layers"), int):  # else the engine tells, when the model is loaded
        parse_boundaries(boundaries, _layers(target, model))
    return boundaries


def _target(model: str, *, fetch: bool) -> Mapping[str, Any]:
    """The text part of the model's config; empty for a hub id that is not to be fetched."""
    path = Path(model) / "config.json"
    if not Path(model).is_dir():
        if not fetch:
            return {}
        from transformers.utils import cached_file  # seconds to import, and only here

        try:
            path = Path(str(cached_file(model, "config.json")))
        except OSError as e:
            raise RequestError(
                ErrorCode.NOT_FOUND, f"config.json of {model}: {e}", next_step="Name a model folder, or give --boundaries."
            ) from e
    elif not path.is_file():
        return {}
    config = _read(path)
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and "num_hidden_layers" in text else config


def _layers(target: Mapping[str, Any], model: str) -> int:
    layers = target.get("num_hidden_layers")
    if not isinstance(layers, int):
        raise RequestError(
            ErrorCode.INVALID_REQUEST,
            f"config.json of {model} names no num_hidden_layers",
            next_step="Give the boundaries by --boundaries.",
        )
    return layers


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RequestError(ErrorCode.NOT_FOUND, f"{path} is not there", next_step="Name a config.json that exists.") from None
    except (OSError, ValueError) as e:
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{path}: {e}", next_step="Name a config.json.") from e
    if not isinstance(data, dict):
        raise RequestError(ErrorCode.INVALID_REQUEST, f"{path} holds no JSON object", next_step="Name a config.json.")
    return data
