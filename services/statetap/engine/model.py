"""What the plugin reads off a loaded SGLang model: the decoder stack, its final norm, and the capture profile that follows.

Invariant: exactly one decoder stack with the number of blocks that the config names, or a refusal that says what was found.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .. import __version__
from ..contracts.boundaries import parse_boundaries
from ..contracts.errors import EngineError, ErrorCode
from ..contracts.profile import FINAL_KINDS, CaptureProfile, NormSpec
from .norms import OTHER, spec_of
from .settings import EngineSettings

_DTYPES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
_NORM_NAMES = ("norm", "final_layernorm", "norm_f", "ln_f")
NOT_ADMITTED = 7
"""Tokens by which the longest prompt that SGLang admits is shorter than the context length (0.5.12 to 0.5.23: managers/tp_worker.py takes
off 1 + 5 and managers/utils.py asks for less than that)."""
_NOT_TEXT = ("vis", "audio", "encoder", "mtp", "nextn")


def final_norm(stack: Any) -> Any:
    """The norm after the last block, or None."""
    return next((getattr(stack, n) for n in _NORM_NAMES if hasattr(stack, n)), None)


def decoder_stack(model: Any, num_layers: int) -> Any:
    """The module that holds ``layers`` and the final norm (``LlamaModel`` and its like). Raises EngineError."""
    import torch.nn as nn

    found = {
        name: m
        for name, m in model.named_modules()
        if isinstance(getattr(m, "layers", None), nn.ModuleList)
        and len(m.layers) == num_layers
        and final_norm(m) is not None
        and not any(part in name.lower() for part in _NOT_TEXT)
    }
    if len(found) != 1:
        raise EngineError(
            ErrorCode.ENGINE_START_FAILED,
            f"{type(model).__name__}: {len(found)} decoder stacks of {num_layers} blocks found ({sorted(found)}), one is needed",
        )
    return next(iter(found.values()))


def final_norm_spec(norm: Any, final: str) -> NormSpec:
    """Variant and eps of the final norm. Raises EngineError where only pre is kept and readers could not derive post from it."""
    spec = spec_of(norm)
    if final == "pre" and spec.variant == OTHER:
        raise EngineError(
            ErrorCode.INVALID_REQUEST,
            f"final norm {type(norm).__name__}: readers, who know RMSNorm only, could not derive the final state from the pre-norm one; "
            "start with --final post, both or none",
            next_step="Start the engine with --final post, both or none.",
        )
    return spec


def weights_revision(model_path: str, revision: str | None) -> str:
    """The revision that the user named, or a fingerprint of config.json and the weight files' names and sizes."""
    if revision:
        return revision
    folder = Path(model_path)
    if not folder.is_dir():
        return "main"
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    digest.update(json.dumps([(f.name, f.stat().st_size) for f in files]).encode())
    return digest.hexdigest()[:12]


def capture_profile(runner: Any, stack: Any, settings: EngineSettings) -> CaptureProfile:
    """The profile of this engine. ``runner`` is SGLang's ModelRunner after its model is loaded. Raises EngineError."""
    import sglang

    config = runner.model_config
    text = getattr(config, "hf_text_config", config.hf_config)
    num_layers = len(stack.layers)
    dtype = _DTYPES.get(str(runner.dtype))
    if dtype is None:
        raise EngineError(ErrorCode.ENGINE_START_FAILED, f"states of {runner.dtype} cannot be kept (float32, bfloat16 and float16 can)")
    if settings.final not in FINAL_KINDS:
        raise EngineError(ErrorCode.INVALID_REQUEST, f"final: {settings.final!r} is none of {', '.join(FINAL_KINDS)}")
    return CaptureProfile(
        model=settings.model or config.model_path,
        revision=weights_revision(config.model_path, getattr(config, "revision", None)),
        quantization=str(getattr(config, "quantization", None) or "none"),
        boundaries=parse_boundaries(settings.boundaries, num_layers),
        final=settings.final,
        dtype=dtype,
        hidden=int(config.hidden_size),
        num_layers=num_layers,
        vocab_size=int(text.vocab_size),
        max_length=int(config.context_len) - NOT_ADMITTED,
        norm=final_norm_spec(final_norm(stack), settings.final),
        sglang_version=sglang.__version__,
        plugin_version=__version__,
    )
