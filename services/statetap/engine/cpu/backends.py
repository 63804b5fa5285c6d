"""What SGLang's torch_native attention lacks on hosts without AMX. Models of MLA: always the absorbed method, since torch_native
reads K and V from the cache only. (gpt-oss' sinks and others: with the models' own issue.)
"""

from __future__ import annotations


def register_backends() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
