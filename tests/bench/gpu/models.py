"""Random bf16 checkpoints whose heads the Hopper kernels take: ``python -m tests.bench.gpu.models FOLDER [--device cuda]``

llama, qwen3 and deepseek_v2 (MLA), 8 blocks, hidden 1024. The weights are large enough that each block changes the stream, so that one layer
off shows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers as hf

BASE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MLA = {
    "moe_intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 1, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
}  # fmt: skip
MODELS = {
    "llama": (
        "LlamaForCausalLM",
        hf.LlamaConfig,
        {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128},
        {"rope_theta": 5e5},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        hf.Qwen3Config,
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        {"rope_theta": 1e6},
    ),
    # SGLang reads keys that transformers does not write
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        hf.DeepseekV2Config,
        MLA,
        {"rope_theta": 1e4, "moe_layer_freq": 1, "scoring_func": "softmax"},
    ),
}


def make(name: str, folder: Path, device: str) -> None:
    architecture, config, of, written = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(hf, architecture)(config(**BASE, **of, attn_implementation="eager"))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.04)
            else:
                p.uniform_(0.8, 1.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | written | {"torch_dtype": "bfloat16"}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    for name in MODELS:
        make(name, args.folder / name, args.device)


if __name__ == "__main__":
    main()
