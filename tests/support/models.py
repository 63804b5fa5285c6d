"""Tiny random models, one builder an architecture: 6 or 8 blocks, hidden 64, fp32, made the same at every call.

python -m tests.support.models NAME FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

VOCAB = 1000
TEXT = "text"
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = BASE | {"num_key_value_heads": 2, "intermediate_size": 128}
HEADS = GROUPED | {"head_dim": 16}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
MLA = BASE | {
    "num_key_value_heads": 4, "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "rope_parameters": YARN,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Built:
    """How a model is made. ``more``: keys of config.json that SGLang reads and transformers does not write."""

    make: Callable[[], Any]
    more: dict[str, Any]
    final: str = "both"
    wrap: Callable[[Path], None] | None = None  # puts the text model of a folder into the vision model around it


def _built(cls: str, config: str, more: dict[str, Any] | None = None, final: str = "both", wrap: Any = None, **fields: Any) -> Built:
    return Built(make=lambda: getattr(hf, cls)(getattr(hf, config)(**fields)), more=more or {}, final=final, wrap=wrap)


def _kimi(folder: Path) -> None:
    """Kimi-K2.5 around a DeepSeek-V3: its names and config, and a vision tower whose weights (no text reads them) are not there."""
    weights = folder / "model.safetensors"
    save_file({f"language_model.{k}": v for k, v in load_file(weights).items()}, weights, metadata={"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    vision = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 64, "text_hidden_size": 64}
    vision |= {f"vt_{k}": v for k, v in vision.items()}  # the published config's names
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text, "vision_config": vision}
    # Without its image processor, which would need torchvision.
    config |= {"media_placeholder_token_id": 999, "language_model_only": True, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


MODELS: dict[str, Built] = {
    "llama": _built("LlamaForCausalLM", "LlamaConfig", **HEADS),
    "qwen2": _built("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    # tied: the embedding matrix is the head
    "qwen3": _built("Qwen3ForCausalLM", "Qwen3Config", **HEADS, tie_word_embeddings=True),
    "qwen3_moe": _built(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **HEADS, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "mixtral": _built("MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": _built(
        "DeepseekV2ForCausalLM", "DeepseekV2Config", **MLA, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1,
        routed_scaling_factor=1.0, more={"moe_layer_freq": 1, "scoring_func": "softmax", "ep_size": 1},
    ),
    "deepseek_v3": _built(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **MLA, q_lora_rank=48, n_group=2, topk_group=1, routed_scaling_factor=2.5,
        norm_topk_prob=True, more={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1},
    ),
    "gpt_oss": _built(
        "GptOssForCausalLM", "GptOssConfig", **HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 3, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    # one layer in six attends to everything
    "gemma3": _built("Gemma3ForCausalLM", "Gemma3TextConfig", **HEADS | {"num_hidden_layers": 8}, sliding_window=128, query_pre_attn_scalar=16),
    "glm4_moe": _built(
        "Glm4MoeForCausalLM", "Glm4MoeConfig", **HEADS, moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5,
        use_qk_norm=True, partial_rotary_factor=0.5,
    ),
    # the text part of a vision model: DeepSeek-V3 below language_model, beside a vision tower with as many blocks
    "kimi_k25": _built(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", **MLA, q_lora_rank=48, n_group=1, topk_group=1, routed_scaling_factor=2.8,
        norm_topk_prob=True, more={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}, wrap=_kimi,
    ),
    # muP: embeddings, residuals and logits are scaled
    "granite": _built(
        "GraniteForCausalLM", "GraniteConfig", **GROUPED, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.0625,
        logits_scaling=8.0, tie_word_embeddings=True,
    ),
    # norms after attention and feed-forward: the attention gets the stream itself
    "olmo2": _built("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    # LayerNorm everywhere: post cannot be derived from pre by the readers
    "starcoder2": _built("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED, use_bias=True, final="post"),
}  # fmt: skip

SHORT = ("mixtral", "gemma3", "deepseek_v3")
"""The models of `make test`: no capture of SGLang's own; one that is wrong; MLA with the setter of odd ids."""


def make_model(name: str, folder: Path) -> Path:
    """Write config and fp32 weights of the model ``name`` to ``folder``."""
    hf_logging.disable_progress_bar()
    torch.manual_seed(0)
    built = MODELS[name]
    model = built.make().eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            # All ones (or zeros) would hide a norm that is left out or applied twice, or a wrong variant of it.
            if "norm" in key and value.dim() == 1:
                value.normal_(0.0 if name == "gemma3" or key.endswith("bias") else 1.0, 0.2)
            elif key.endswith("correction_bias"):
                value.normal_(0.0, 0.5)
            elif "sinks" in key:  # SGLang keeps them in bf16 whatever the model's dtype, as the published checkpoints do
                value.copy_(torch.randn_like(value).bfloat16())
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | built.more, indent=1))
    if built.wrap is not None:
        shutil.copytree(folder, folder / TEXT)
        built.wrap(folder)
    return folder


def reference_of(folder: Path) -> Path:
    """The folder that transformers reads: of a vision model, its text part as it was saved."""
    return folder / TEXT if (folder / TEXT).is_dir() else folder


if __name__ == "__main__":
    print(make_model(sys.argv[1], Path(sys.argv[2])))
