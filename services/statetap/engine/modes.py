"""What SGLang made of its flags: modes that break capture, looked for in the resolved settings before the model is loaded.

The second line of defence behind flags.py: environment variables, a model's own overrides and SGLang's defaults switch modes on too.
Invariant: an engine in such a mode does not load its model, and says why.
"""

from __future__ import annotations

from typing import Any

from ..contracts.errors import EngineError, ErrorCode
from .flags import (
    CACHED,
    COMPILED,
    CONTEXT_PARALLEL,
    DATA_PARALLEL,
    DECODING,
    DISAGGREGATION,
    DP_ATTENTION,
    NO_PREFILL,
    ONE_PROCESS,
    PIPELINE,
    PREFILL_GRAPH,
    SCATTERED,
    TRUNCATE,
    TWO_BATCH,
)

_OFF = (None, False)
_ONE = (None, 1)

RESOLVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "pp_size": (_ONE, PIPELINE),
    "dp_size": (_ONE, DATA_PARALLEL),
    "dwdp_size": (_ONE, DATA_PARALLEL),
    "moe_dp_size": (_ONE, DATA_PARALLEL),
    "attn_dp_size": (_ONE, DP_ATTENTION),
    "enable_dp_attention": (_OFF, DP_ATTENTION),
    "attn_cp_size": (_ONE, CONTEXT_PARALLEL),
    "dcp_size": (_ONE, CONTEXT_PARALLEL),
    "enable_prefill_cp": (_OFF, CONTEXT_PARALLEL),
    "enable_two_batch_overlap": (_OFF, TWO_BATCH),
    "enable_layernorm_sp": (_OFF, SCATTERED),
    "enable_attn_tp_input_scattered": (_OFF, SCATTERED),
    "enable_scattered_sconv": (_OFF, SCATTERED),
    "enable_pdmux": (_OFF, DISAGGREGATION),
    "disaggregation_mode": ((None, "null"), DISAGGREGATION),
    "speculative_algorithm": ((None, "NONE"), DECODING),
    "dllm_algorithm": ((None,), DECODING),
    "encoder_only": (_OFF, NO_PREFILL),
    "is_embedding": (_OFF, NO_PREFILL),
    "tokenizer_worker_num": (_ONE, ONE_PROCESS),
    "allow_auto_truncate": (_OFF, TRUNCATE),
    "enable_torch_compile": (_OFF, COMPILED),
    "disable_radix_cache": ((True,), CACHED),
    "enable_session_radix_cache": (_OFF, CACHED),
    "enable_streaming_session": (_OFF, CACHED),
    "enable_hierarchical_cache": (_OFF, CACHED),
    "enable_lmcache": (_OFF, CACHED),
    "enable_flexkv": (_OFF, CACHED),
}
"""Field of ServerArgs -> (values with which capture works, why others are refused). A field that this SGLang lacks is passed over."""


def check_modes(server_args: Any) -> None:
    """Raises EngineError ``flag_refused`` that names every mode in which SGLang is and which breaks capture."""
    wrong = [
        f"{name} = {value!r}: {why}"
        for name, (allowed, why) in RESOLVED.items()
        if (value := resolved(server_args, name)) is not _ABSENT and value not in allowed
    ]
    if graph := _prefill_graph(server_args):
        wrong.append(f"{graph}: {PREFILL_GRAPH}")
    if wrong:
        raise EngineError(ErrorCode.FLAG_REFUSED, f"SGLang resolved its settings to {'; '.join(wrong)}")


_ABSENT = object()


def resolved(server_args: Any, name: str) -> Any:
    """A setting as SGLang resolved it: from 0.5.20 on ServerArgs keeps what was asked for, and the answer stands beside it."""
    if not hasattr(server_args, name):
        return _ABSENT
    try:
        from sglang.srt.arg_groups.overrides import resolution_result
    except ImportError:
        return getattr(server_args, name, _ABSENT)
    return resolution_result(server_args, name, _ABSENT)


def _prefill_graph(server_args: Any) -> str:
    """Which setting turns prefill graphs on, or nothing. Graphs of decoding do no harm: no row of them is captured."""
    config = resolved(server_args, "cuda_graph_config")
    if config is not _ABSENT and config is not None:
        prefill = config["prefill"] if isinstance(config, dict) else config.prefill
        backend = prefill.get("backend") if isinstance(prefill, dict) else prefill.backend
        return "" if str(getattr(backend, "value", backend)) == "disabled" else f"cuda_graph_config.prefill.backend = {backend!r}"
    if resolved(server_args, "disable_cuda_graph") is True or resolved(server_args, "disable_piecewise_cuda_graph") is True:
        return ""
    piecewise = resolved(server_args, "enable_piecewise_cuda_graph")
    return "enable_piecewise_cuda_graph = True" if piecewise is True else ""
