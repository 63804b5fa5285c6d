"""SGLang's flags as far as they concern capture: those that we set, and those that break it and are refused by name.

Invariant: a flag is refused before anything starts, with the reason; nothing is overridden in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..contracts.errors import EngineError, ErrorCode
from .hosts import ALONE, Nodes

OURS = {
    "--model-path": "give it as --model",
    "--model": "give it before the --",
    "--host": "the engine listens where Statetap tells it",
    "--port": "the engine listens where Statetap tells it",
    "--tp-size": "give it as --tp before the --",
    "--tensor-parallel-size": "give it as --tp before the --",
    "--tp": "give it before the --",
    "--trust-remote-code": "give it before the --",
    "--nnodes": "give it before the --",
    "--node-rank": "give it before the --",
    "--dist-init-addr": "give it before the --",
    "--nccl-init-addr": "give it as --dist-init-addr before the --",
}

CACHED = "tokens from a prefix cache have no states"
COMPILED = "compiled layers do not run the taps"
CONTEXT_PARALLEL = "context parallel prefill splits a prompt over ranks"
DATA_PARALLEL = "data parallel needs a writer a rank; start several engines (--engines N)"
DECODING = "it changes what a forward computes; capture needs plain prefill"
DISAGGREGATION = "prefill and decode in one process is what is tapped"
DP_ATTENTION = "data-parallel attention needs a writer a rank"
NO_HTTP = "the reply that waits for the tap file is HTTP"
NO_PREFILL = "there is no prefill by /generate"
ONE_PROCESS = "replies are matched with tap files in one process"
PIPELINE = "a pipeline stage sees only its own layers"
PREFILL_GRAPH = "taps do not run in the replay of a prefill graph"
SCATTERED = "it scatters the residual stream over ranks"
TRUNCATE = "a prompt would be cut in silence"
TWO_BATCH = "two-batch overlap splits a forward"

REFUSED = {
    "--allow-auto-truncate": TRUNCATE,
    "--attention-context-parallel-size": CONTEXT_PARALLEL,
    "--attention-data-parallel-size": DP_ATTENTION,
    "--attn-cp-size": CONTEXT_PARALLEL,
    "--attn-dp-size": DP_ATTENTION,
    "--config": "flags in a file cannot be checked; name them after the --",
    "--cuda-graph-backend-prefill": PREFILL_GRAPH,
    "--cuda-graph-bs-prefill": PREFILL_GRAPH,
    "--cuda-graph-config": PREFILL_GRAPH,
    "--data-parallel-size": DATA_PARALLEL,
    "--dcp-size": CONTEXT_PARALLEL,
    "--decode-context-parallel-size": CONTEXT_PARALLEL,
    "--decoupled-spec-role": DECODING,
    "--disaggregation-mode": DISAGGREGATION,
    "--dllm-algorithm": DECODING,
    "--dp": DATA_PARALLEL,
    "--dp-size": DATA_PARALLEL,
    "--dwdp-size": DATA_PARALLEL,
    "--enable-attn-tp-input-scattered": SCATTERED,
    "--enable-dp-attention": DP_ATTENTION,
    "--enable-flexkv": CACHED,
    "--enable-hicache": CACHED,
    "--enable-hierarchical-cache": CACHED,
    "--enable-http-worker-reuseport": ONE_PROCESS,
    "--enable-layernorm-sp": SCATTERED,
    "--enable-lmcache": CACHED,
    "--enable-mis": "several items in one prompt are masked from each other",
    "--enable-multi-layer-eagle": DECODING,
    "--enable-pdmux": "it interleaves prefill and decode on one GPU",
    "--enable-piecewise-cuda-graph": PREFILL_GRAPH,
    "--enable-prefill-cp": CONTEXT_PARALLEL,
    "--enable-return-aux-hidden-states": "the taps do it; two captures would cost twice",
    "--enable-scattered-sconv": SCATTERED,
    "--enable-session-radix-cache": CACHED,
    "--enable-streaming-session": CACHED,
    "--enable-torch-compile": COMPILED,
    "--enable-two-batch-overlap": TWO_BATCH,
    "--encoder-only": NO_PREFILL,
    "--grpc-mode": NO_HTTP,
    "--is-embedding": NO_PREFILL,
    "--moe-data-parallel-size": DATA_PARALLEL,
    "--moe-dp-size": DATA_PARALLEL,
    "--pipeline-parallel-size": PIPELINE,
    "--pp": PIPELINE,
    "--pp-size": PIPELINE,
    "--radix-cache-backend": CACHED,
    "--smg-grpc-mode": NO_HTTP,
    "--speculative-algorithm": DECODING,
    "--speculative-draft-model": DECODING,
    "--speculative-draft-model-path": DECODING,
    "--tokenizer-worker-num": ONE_PROCESS,
    "--use-ray": "the launcher starts SGLang's own processes",
}
"""Flag -> why. Environment switches are checked too: see :func:`check_environment`."""

REFUSED_ENVIRONMENT = {"SGLANG_RUST_SERVER": "the Rust server bypasses the process in which replies wait for tap files"}


def check_flags(flags: Sequence[str]) -> None:
    """Raises EngineError ``flag_refused`` that names the first flag of ``flags`` that breaks capture.

    SGLang's parser takes unambiguous beginnings of a flag too (``--enable-dp-att``), so those are refused with it.
    """
    for flag in flags:
        name = flag.split("=", 1)[0].replace("_", "-") if flag.startswith("--") else ""
        full = _full(name)
        why = REFUSED.get(full) or OURS.get(full)
        if why:
            raise EngineError(ErrorCode.FLAG_REFUSED, f"{full if full == name else f'{name} ({full})'}: {why}")


def _full(name: str) -> str:
    """The flag of our tables that ``name`` is, or is the beginning of; else the name. (A test sees that no whole flag is such a beginning.)"""
    if len(name) <= len("--") or name in REFUSED or name in OURS:
        return name
    return next((flag for flag in (*REFUSED, *OURS) if flag.startswith(name)), name)


def check_environment(environment: dict[str, str]) -> None:
    """Raises EngineError ``flag_refused`` for an SGLang switch of the environment that breaks capture."""
    for name, why in REFUSED_ENVIRONMENT.items():
        if environment.get(name, "").lower() in ("1", "true", "yes", "y"):
            raise EngineError(ErrorCode.FLAG_REFUSED, f"{name}: {why}")


def server_argv(
    *,
    model: str,
    host: str,
    port: int,
    tp: int,
    trust_remote_code: bool,
    cpu: bool,
    extra: Sequence[str],
    cpu_attention: str = "torch_native",
    nodes: Nodes = ALONE,
) -> list[str]:
    """The command line of SGLang (the server process adds the flags that turn CUDA graphs off). Raises EngineError ``flag_refused``.

    ``cpu_attention``: the attention backend where ``cpu`` is set. ``nodes``: where this launcher stands, where there are several hosts.
    """
    check_flags(extra)
    argv = ["--model-path", model, "--host", host, "--port", str(port), "--tp-size", str(tp)]
    # ids in, ids out; no states for cached tokens; prompts in the order they come; no request before the self-check
    argv += ["--skip-tokenizer-init", "--disable-radix-cache", "--schedule-policy", "fcfs", "--skip-server-warmup"]
    if nodes.several:
        argv += ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank), "--dist-init-addr", nodes.address]
    if trust_remote_code:
        argv.append("--trust-remote-code")
    if cpu:
        defaults = {
            "--device": "cpu",
            "--attention-backend": cpu_attention,
            "--dtype": "float32",
            "--max-total-tokens": "65536",
            "--max-running-requests": "64",
        }
        given = {f.split("=", 1)[0] for f in extra}
        argv += [part for name, value in defaults.items() if name not in given for part in (name, value)]
        argv.append("--sleep-on-idle")
    return [*argv, *extra]
