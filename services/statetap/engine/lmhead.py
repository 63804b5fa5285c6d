"""The check for models that no host can run in transformers: lm_head(norm(final)) of the files against the log probabilities that the
engine itself reports for the same prompts.

Invariant: of the model only the head and the final norm are read, by name, from the safetensors shards, a block of rows at a time;
the states come from the files, the log probabilities from a request that captures nothing. A control (the states one position off)
that does *not* differ fails the comparison too. It tells whether the final state is right, and nothing of the other boundaries.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ..contracts.errors import EngineError, ErrorCode, RequestError
from ..contracts.profile import CaptureProfile
from ..contracts.tensors import FINAL_POST, FINAL_PRE, INPUT_IDS
from .norms import GEMMA_RMSNORM, OTHER, rms_normed
from .parity import Tensors

ROWS = 8192  # rows of the head in memory at once: 235 MB at H = 7168 in fp32

TOLERANCE = {"F32": 1e-4, "BF16": 5e-2, "F16": 1e-2}
"""Largest mean difference of log probabilities: an engine in bf16 rounds logits of 16 to 32 to the nearest 0.125."""

DISTINCT = 10.0  # the control must be so many times farther away

_HEAD = ("lm_head.weight", "output.weight")
_TIED = ("embed_tokens.weight", "wte.weight")
_NORM = (".norm.weight", ".final_layernorm.weight", ".ln_f.weight", ".norm_f.weight")
_NOT_TEXT = ("visi", "visual", "audio", "encoder", "mtp", ".layers.", "draft", "projector")


@dataclass(kw_only=True)
class HeadParity:
    """Mean absolute differences of log probabilities; ``agree``: rows whose next token is the head's too."""

    tolerance: float
    rows: int = 0
    tokens: int = 0
    agree: int = 0
    sums: dict[str, float] = field(default_factory=lambda: {"error": 0.0, "shifted": 0.0})
    worst: float = 0.0

    @property
    def error(self) -> float:
        return self.sums["error"] / self.tokens if self.tokens else math.inf

    @property
    def shifted(self) -> float:
        return self.sums["shifted"] / self.tokens if self.tokens else 0.0

    @property
    def ok(self) -> bool:
        return self.tokens > 0 and self.error <= self.tolerance and self.shifted > max(DISTINCT * self.error, self.tolerance)


class Head:
    """The head of a model folder. Raises RequestError ``not_found`` or ``invalid_request`` where it is not there or is quantised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._map = weight_map(folder)
        config = json.loads((folder / "config.json").read_text())
        self._config = {**config, **(config.get("text_config") or {})}
        self._name = self._find(_HEAD) or self._find(_TIED)
        if self._name is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"{folder}: no weight is called {' or '.join(_HEAD + _TIED)}")

    def _find(self, endings: Sequence[str]) -> str | None:
        names = [
            n for n in self._map if f".{n}".endswith(tuple(f".{e.lstrip('.')}" for e in endings)) and not any(p in n for p in _NOT_TEXT)
        ]
        return min(names, key=len, default=None)

    def norm_weight(self) -> torch.Tensor:
        """The final norm's weight, [H] in fp32."""
        name = self._find(_NORM)
        if name is None:
            raise RequestError(ErrorCode.NOT_FOUND, f"{self.folder}: no weight is called {' or '.join(n[1:] for n in _NORM)}")
        with safe_open(str(self.folder / self._map[name]), "pt") as f:
            return f.get_tensor(name).float()

    def log_probabilities(self, post: torch.Tensor, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of ``post`` [T, H] in fp32: the log probability of ``tokens[t]`` after row t [T], and the most probable token [T]."""
        T, wanted = post.shape[0], torch.tensor(tokens)
        total = torch.full((T,), -math.inf)
        best, argbest, chosen = torch.full((T,), -math.inf), torch.zeros(T, dtype=torch.long), torch.full((T,), math.nan)
        with safe_open(str(self.folder / self._map[self._name or ""]), "pt") as f:
            head = f.get_slice(self._name)
            if head.get_dtype() not in ("F32", "BF16", "F16"):
                raise RequestError(
                    ErrorCode.INVALID_REQUEST, f"{self._name} is {head.get_dtype()}: a quantised head cannot be applied here"
                )
            vocabulary = head.get_shape()[0]
            for start in range(0, vocabulary, ROWS):
                stop = min(start + ROWS, vocabulary)
                logits = self._scaled(post @ head[start:stop].float().T)
                total = torch.logaddexp(total, logits.logsumexp(-1))
                top, at = logits.max(-1)
                argbest = torch.where(top > best, at + start, argbest)
                best = torch.maximum(best, top)
                here = ((wanted >= start) & (wanted < stop)).nonzero()[:, 0]
                chosen[here] = logits[here, wanted[here] - start]
        return chosen - total, argbest

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """muP and soft-capped heads, by the keys of the published configs (Granite, Cohere, MiniCPM, Gemma 2)."""
        c = self._config
        logits = logits / c.get("logits_scaling", 1.0) * c.get("logit_scale", 1.0)
        if "dim_model_base" in c:
            logits = logits / (c["hidden_size"] / c["dim_model_base"])
        cap = c.get("final_logit_softcapping")
        return torch.tanh(logits / cap) * cap if cap else logits


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file of a model folder. Raises RequestError ``not_found`` where it holds no safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RequestError(
            ErrorCode.NOT_FOUND, f"{folder} holds no safetensors", next_step="Name the folder that the engine's weights were read from."
        )
    found: dict[str, str] = {}
    for file in files:
        with safe_open(str(file), "pt") as f:
            found |= dict.fromkeys(f.keys(), file.name)
    return found


def ask_engine(url: str, ids: list[int], *, timeout_s: float = 600.0) -> tuple[list[float], int, float]:
    """The engine's log probabilities of ids[1:], its next token and that one's. Raises EngineError."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(f"{url.rstrip('/')}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            meta = json.load(response)["meta_info"]
    except urllib.error.HTTPError as e:
        raise EngineError(ErrorCode.ENGINE_REJECTED, f"{url} answered {e.code}: {e.read()[:500].decode(errors='replace')}") from e
    except OSError as e:
        raise EngineError(ErrorCode.ENGINE_UNREACHABLE, f"{url}: {e}") from e
    given = [float(item[0]) for item in meta["input_token_logprobs"][1:]]  # the first token has none
    probability, token, *_ = meta["output_token_logprobs"][0]
    return given, int(token), float(probability)


def compare_head(
    files: Iterable[Path],
    profile: CaptureProfile,
    folder: Path,
    url: str,
    *,
    tolerance: float | None = None,
    load: Callable[[Path], Tensors] = load_file,
) -> HeadParity:
    """Compare the final states of sample files with what the engine at ``url`` makes of them. Raises RequestError, EngineError."""
    if profile.final == "none" or (profile.final == "pre" and profile.norm.variant == OTHER):
        raise RequestError(
            ErrorCode.INVALID_REQUEST, f"final {profile.final!r}: the files hold no final state that the head could be applied to"
        )
    head, result = Head(folder), HeadParity(tolerance=tolerance or TOLERANCE[profile.dtype])
    weight = head.norm_weight() if profile.final == "pre" else None
    for path in files:
        tensors = load(path)
        ids: list[int] = tensors[INPUT_IDS].tolist()
        final: Any = tensors[FINAL_PRE if weight is not None else FINAL_POST].float()
        if weight is not None:
            final = rms_normed(final, weight, profile.norm.eps, offset=profile.norm.variant == GEMMA_RMSNORM)
        given, token, probability = ask_engine(url, ids)
        theirs = torch.tensor([*given, probability])
        ours, best = head.log_probabilities(final, [*ids[1:], token])
        off, _ = head.log_probabilities(final.roll(1, 0), [*ids[1:], token])
        difference = (ours - theirs).abs()
        result.rows += 1
        result.tokens += len(ids)
        result.agree += int(best[-1]) == token
        result.worst = max(result.worst, float(difference.max()))
        result.sums["error"] += float(difference.sum())
        result.sums["shifted"] += float((off - theirs).abs().sum())
    return result
