"""What SGLang's torch_native attention lacks on hosts without AMX. Models of MLA: always the absorbed method, since torch_native
reads K and V from the cache only. gpt-oss: attention sinks, by a reference backend.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SINKS = "triton"
"""The name of the backend with sinks. gpt-oss accepts names of a fixed list only (sglang arg_groups/model_hook.py), and this host has
no Triton that the name could mean."""

_WITH_SINKS = ("GptOssForCausalLM",)


def attention_backend(model: str) -> str:
    """SGLang's name of the attention backend that serves a model folder on the CPU."""
    config = Path(model) / "config.json"
    architectures = json.loads(config.read_text()).get("architectures") or [] if config.is_file() else []
    return SINKS if any(a in _WITH_SINKS for a in architectures) else "torch_native"


def register_backends() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)

    @register_attention_backend(SINKS)
    def create(runner: Any) -> Any:
        from .sinks import SinkBackend

        return SinkBackend(runner)
