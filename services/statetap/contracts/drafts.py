"""Boundaries from a drafter's config.json, whose layer ids mean different things in different projects.

Invariant: ids are translated only where the config itself says which convention they follow; anything else is refused with both
readings named. One layer off halves a drafter's acceptance and no error ever says so.

| Config | Ids | Boundaries |
|---|---|---|
| speculators (``speculators_config``) | top level, boundaries, the last may be L | as they are |
| SpecForge, ModelOpt, TorchSpec (``eagle_config``) | block outputs, from 0 | id + 1 |
| either, without ids | | [2, L//2, L-3] |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .boundaries import default_boundaries, validate_boundaries
from .errors import ErrorCode, RequestError

IDS = "eagle_aux_hidden_state_layer_ids"

# Targets whose setter in SGLang (deepseek_v2.py, glm4_moe_lite.py) takes ids as block outputs only when the first is 1, and as
# boundaries otherwise: drafters for them were trained and are served under both readings.
_EITHER_WAY = ("deepseek", "kimi", "glm4_moe_lite")
_GIVE = "Give the boundaries by --boundaries, as the drafter was trained."


def _refused(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, f"draft config: {message}", next_step=_GIVE)


def draft_boundaries(config: Mapping[str, Any], num_layers: int, *, target: str = "") -> tuple[int, ...]:
    """The boundaries that an EAGLE-3 drafter takes from its target.

    Args:
        config: the drafter's config.json.
        num_layers: L, the target's number of blocks.
        target: the target's ``model_type``, by which SGLang reads some ids differently.

    Raises:
        RequestError: ``invalid_request`` for a config that is not one of an EAGLE-3 drafter, whose convention cannot be told, or whose
            ids are not boundaries of the target.
    """
    eagle = config.get("eagle_config")
    nested = _ids(eagle.get(IDS), f"eagle_config.{IDS}") if isinstance(eagle, Mapping) else None
    top = _ids(config.get(IDS), IDS)
    if isinstance(eagle, Mapping) and eagle.get("use_aux_hidden_state") is False:
        raise _refused("eagle_config.use_aux_hidden_state is false: this drafter takes no states of boundaries")
    if _is_speculators(config):
        if nested is not None:
            raise _refused(f"it is a speculators config and has eagle_config.{IDS} as well: two conventions in one file")
        return default_boundaries(num_layers) if top is None else _verbatim(top, num_layers)
    if top is not None:
        raise _refused(
            f"{IDS} {top} at the top level without speculators_config: speculators means boundaries {top}, "
            f"SpecForge and ModelOpt mean boundaries {[i + 1 for i in top]}"
        )
    if nested is not None:
        return _block_outputs(nested, num_layers, target)
    if isinstance(eagle, Mapping) or any("eagle3" in str(a).lower() for a in config.get("architectures") or []):
        return default_boundaries(num_layers)
    raise _refused(f"architectures {config.get('architectures')}: this is no EAGLE-3 drafter (no eagle_config, no speculators_config)")


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_config" in config or "speculators_model_type" in config or "Eagle3Speculator" in (config.get("architectures") or [])


def _ids(value: Any, where: str) -> list[int] | None:
    """None where no ids are named (an empty list is the default too: NVIDIA's checkpoints have it)."""
    if value is None or value == []:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise _refused(f"{where}: {value!r} is not a list of integers")
    return list(value)


def _verbatim(ids: list[int], num_layers: int) -> tuple[int, ...]:
    if ids == [1, num_layers // 2 - 1, num_layers - 4]:
        # Converters copied SpecForge's ids into speculators configs as they were.
        raise _refused(
            f"{IDS} {ids} in a speculators config are SpecForge's default block outputs (boundaries {[i + 1 for i in ids]}): "
            f"copied by a converter, or meant as boundaries {ids}"
        )
    return validate_boundaries(ids, num_layers)


def _block_outputs(ids: list[int], num_layers: int, target: str) -> tuple[int, ...]:
    shifted = [i + 1 for i in ids]
    if max(ids) == num_layers:
        if target == "gpt_oss":  # SGLang's setter takes them as they are
            return validate_boundaries(ids, num_layers)
        raise _refused(f"{IDS} {ids}: a target of {num_layers} blocks has no block {num_layers}; as boundaries they would be {ids}")
    if any(target.startswith(name) for name in _EITHER_WAY) and ids[0] != 1:
        raise _refused(
            f"{IDS} {ids} for a target of type {target}: SGLang takes them as boundaries {ids}, trainers as block outputs, {shifted}"
        )
    return validate_boundaries(shifted, num_layers)
