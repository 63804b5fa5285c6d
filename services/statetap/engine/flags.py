"""SGLang's flags as far as they concern capture: those that we set, and those that break it and are refused by name.

Invariant: a flag is refused before anything starts, with the reason; nothing is overridden in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..contracts.errors import EngineError, ErrorCode

OURS = {
    "--model-path": "give it as --model",
    "--model": "give it before the --",
    "--host": "the engine listens where Statetap tells it",
    "--port": "the engine listens where Statetap tells it",
    "--tp-size": "give it as --tp before the --",
    "--tensor-parallel-size": "give it as --tp before the --",
    "--tp": "give it before the --",
    "--trust-remote-code": "give it before the --",
}

_PREFILL_GRAPH = "taps do not run in the replay of a prefill graph"
_DECODING = "it changes what a forward computes; capture needs plain prefill"
REFUSED = {
    "--allow-auto-truncate": "a prompt would be cut in silence",
    "--attn-cp-size": "context parallel prefill splits a prompt over ranks",
    "--attention-context-parallel-size": "context parallel prefill splits a prompt over ranks",
    "--attn-dp-size": "data-parallel attention needs a writer a rank",
    "--config": "flags in a file cannot be checked; name them after the --",
    "--cuda-graph-backend-prefill": _PREFILL_GRAPH,
    "--cuda-graph-bs-prefill": _PREFILL_GRAPH,
    "--data-parallel-size": "data parallel needs a writer a rank; start several engines (--engines N)",
    "--disaggregation-mode": "prefill and decode in one process is what is tapped",
    "--dllm-algorithm": _DECODING,
    "--dp-size": "data parallel needs a writer a rank; start several engines (--engines N)",
    "--dp": "data parallel needs a writer a rank; start several engines (--engines N)",
    "--enable-dp-attention": "data-parallel attention needs a writer a rank",
    "--enable-layernorm-sp": "layernorm sequence parallel scatters the residual stream over ranks",
    "--enable-mixed-chunk-tbo": "two-batch overlap splits a forward",
    "--enable-piecewise-cuda-graph": _PREFILL_GRAPH,
    "--enable-pdmux": "it interleaves prefill and decode on one GPU",
    "--enable-return-aux-hidden-states": "the taps do it; two captures would cost twice",
    "--enable-torch-compile": "compiled layers do not run the taps",
    "--enable-two-batch-overlap": "two-batch overlap splits a forward",
    "--encoder-only": "there is no prefill to tap",
    "--grpc-mode": "the reply that waits for the tap file is HTTP",
    "--smg-grpc-mode": "the reply that waits for the tap file is HTTP",
    "--is-embedding": "there is no prefill by /generate",
    "--nnodes": "an engine over several hosts is not supported yet",
    "--pipeline-parallel-size": "a pipeline stage sees only its own layers",
    "--pp-size": "a pipeline stage sees only its own layers",
    "--pp": "a pipeline stage sees only its own layers",
    "--speculative-algorithm": _DECODING,
    "--speculative-draft-model-path": _DECODING,
    "--tokenizer-worker-num": "replies are matched with tap files in one process",
    "--use-ray": "the launcher starts SGLang's own processes",
}
"""Flag -> why. Environment switches are checked too: see :func:`check_environment`."""

REFUSED_ENVIRONMENT = {"SGLANG_RUST_SERVER": "the Rust server bypasses the process in which replies wait for tap files"}


def check_flags(flags: Sequence[str]) -> None:
    """Raises EngineError ``flag_refused`` that names the first flag of ``flags`` that breaks capture."""
    for flag in flags:
        name = flag.split("=", 1)[0].replace("_", "-") if flag.startswith("--") else ""
        why = REFUSED.get(name) or OURS.get(name)
        if why:
            raise EngineError(ErrorCode.FLAG_REFUSED, f"{name}: {why}")


def check_environment(environment: dict[str, str]) -> None:
    """Raises EngineError ``flag_refused`` for an SGLang switch of the environment that breaks capture."""
    for name, why in REFUSED_ENVIRONMENT.items():
        if environment.get(name, "").lower() in ("1", "true", "yes"):
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
) -> list[str]:
    """The command line of SGLang (the server process adds the flags that turn CUDA graphs off). Raises EngineError ``flag_refused``.

    ``cpu_attention``: the attention backend where ``cpu`` is set.
    """
    check_flags(extra)
    argv = ["--model-path", model, "--host", host, "--port", str(port), "--tp-size", str(tp)]
    # ids in, ids out; no states for cached tokens; prompts in the order they come; no request before the self-check
    argv += ["--skip-tokenizer-init", "--disable-radix-cache", "--schedule-policy", "fcfs", "--skip-server-warmup"]
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
