"""Taps on the decoder layers of every scheduler rank: read the residual stream before chosen layers and before the final norm, into
one [rows, K*H] buffer a forward.

Invariant: a row of a buffer belongs to exactly one (rid, position), fixed before the forward by the batch's own lists. A tap that
did not fire fails the requests of that forward; nothing is guessed from shapes or timing.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from ..contracts.errors import ErrorCode
from ..contracts.profile import CaptureProfile
from ..contracts.tensors import AUX, FINAL_POST, FINAL_PRE, INPUT_IDS
from .metrics import Tally
from .model import final_norm
from .ring import ALIGN, Region, Ring
from .writer import Rows, Writers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Rows [start, start + rows) of a forward are positions [position, position + rows) of ``rid``'s prompt of ``total``."""

    rid: str
    start: int
    position: int
    rows: int
    total: int


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """The spans that were asked for, and the number of rows of the whole forward."""

    spans: tuple[Span, ...]
    rows: int


class Taps:
    """Hooks on one model. ``writers`` is None on the ranks that do not write (they still take part in communication)."""

    def __init__(self, stack: Any, profile: CaptureProfile, writers: Writers | None, ring: Ring) -> None:
        self.stack, self.profile, self.writers, self._ring = stack, profile, writers, ring
        self.norm = final_norm(stack)
        self.num_layers, self.hidden = profile.num_layers, profile.hidden
        # Boundary L is read at the final norm whatever is kept: the self-check needs it, and it costs one copy.
        self._columns = {b: k for k, b in enumerate(profile.boundaries)}
        self._plan: ForwardPlan | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._fired = 0
        self._post: torch.Tensor | None = None
        self.last_output: Any = None  # what the stack returned: the self-check takes SGLang's own capture from it
        self.observe: Any = None  # the self-check's way in: called with (buffers, plan) at the end of a forward
        self._side_stream: Any = None
        self.tally = Tally()
        for b in profile.boundaries:
            if b < self.num_layers:
                layer = stack.layers[b]
                layer.register_forward_pre_hook(self._layer_hook(b, layer), with_kwargs=True)
        self.norm.register_forward_pre_hook(self._norm_hook, with_kwargs=True)
        stack.register_forward_hook(self._stack_hook)

    # -------------------------------------------------------------- around one forward
    @property
    def capturing(self) -> bool:
        """Whether the forward that runs now is one that somebody asked for."""
        return self._plan is not None

    def begin(self, plan: ForwardPlan, device: torch.device, dtype: torch.dtype) -> None:
        n, H, K = plan.rows, self.hidden, len(self.profile.boundaries)
        self._plan, self._fired, self._post = plan, 0, None
        self._buffers = {
            AUX: torch.empty((n, K * H), dtype=dtype, device=device),
            FINAL_PRE: torch.empty((n, H), dtype=dtype, device=device),
        }

    def end(self, input_ids: torch.Tensor) -> None:
        """Hand the rows to the writers. ``input_ids`` [rows]: the ids that this forward really ran."""
        plan, self._plan = self._plan, None
        if plan is None:
            return
        buffers, self._buffers = self._buffers, {}
        wanted = len(self.profile.boundaries) + 1
        whole = self._fired == wanted
        if self.profile.final in ("post", "both"):
            if self._post is None or self._post.shape[0] < plan.rows:
                whole = False
            else:
                buffers[FINAL_POST] = self._post[: plan.rows]
        if self.observe is not None and whole:
            self.observe(buffers, plan)
        if self.writers is None:
            return
        if not whole:
            for span in plan.spans:
                self.writers.fail(span.rid, ErrorCode.CAPTURE_INCOMPLETE, f"{self._fired} of {wanted} taps fired in the forward")
            return
        if self.profile.final not in ("pre", "both"):
            del buffers[FINAL_PRE]
        buffers[INPUT_IDS] = input_ids[: plan.rows].to(torch.int32, copy=True)
        size = sum(-(-t.nbytes // ALIGN) * ALIGN for t in buffers.values())
        region = self._ring.take(size, len(plan.spans))
        if region is None:
            for span in plan.spans:
                self.writers.fail(span.rid, ErrorCode.CAPTURE_BACKPRESSURE, f"no room for {size} bytes in the ring between GPU and tap")
            return
        self.tally.forwards += 1
        self.tally.copied_bytes += size
        try:
            host, ready, begun = self._to_host(buffers, region)
        except Exception as e:
            logger.exception("statetap: copying the states of a forward")
            for span in plan.spans:
                region.done()
                self.writers.fail(span.rid, ErrorCode.CAPTURE_INCOMPLETE, f"copying the states: {e!r}")
            return
        for s in plan.spans:
            rows = {name: t[s.start : s.start + s.rows] for name, t in host.items()}
            self.writers.put(Rows(rid=s.rid, total=s.total, position=s.position, planes=rows, region=region, ready=ready, begun=begun))
            begun = None

    def abandon(self) -> None:
        """The forward raised: its rows are nothing."""
        self._plan, self._buffers = None, {}

    def _to_host(self, buffers: dict[str, torch.Tensor], region: Region) -> tuple[dict[str, torch.Tensor], Any, Any]:
        """Copies on a side stream into the ring's region, and the events after and before them; on the CPU the buffers as they are."""
        if next(iter(buffers.values())).device.type != "cuda":
            return buffers, None, None
        memory, at, host = self._ring.memory(), region.start, {}
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream()
        self._side_stream.wait_stream(torch.cuda.current_stream())
        begun = torch.cuda.Event(enable_timing=True)
        # A writer that waits for it sleeps, and leaves its core to the scheduler.
        ready = torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(self._side_stream):
            begun.record(self._side_stream)
            for name, t in buffers.items():
                host[name] = memory[at : at + t.nbytes].view(t.dtype).view(t.shape)
                host[name].copy_(t, non_blocking=True)
                t.record_stream(self._side_stream)  # the forward stream must not reuse it before the copy
                at += -(-t.nbytes // ALIGN) * ALIGN
            ready.record(self._side_stream)
        return host, ready, begun

    # -------------------------------------------------------------- hooks in the forward
    def _layer_hook(self, b: int, layer: Any) -> Any:
        signature = inspect.signature(layer.forward)
        if "hidden_states" not in signature.parameters:
            raise TypeError(f"layer {b} ({type(layer).__name__}) takes no hidden_states: {signature}")

        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if self._plan is None:
                return
            given = signature.bind(*args, **kwargs).arguments
            hidden, residual = given["hidden_states"], given.get("residual")
            batch = given.get("forward_batch") or given.get("kwargs", {}).get("forward_batch")
            if "residual" not in signature.parameters and getattr(batch, "residual_stream", None) is not None:
                # From 0.5.22 on the residual lives in the batch, and hidden_states may owe an all-reduce: the snapshot
                # completes it, so it runs on every rank alike.
                from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

                hidden = residual_batch.snapshot(hidden, batch)
            self._keep(b, hidden, residual)

        return hook

    def _norm_hook(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._plan is not None:
            hidden = args[0] if args else kwargs["x"]
            residual = args[1] if len(args) > 1 else kwargs.get("residual")
            self._keep(self.num_layers, hidden, residual)

    def _stack_hook(self, module: Any, args: Any, output: Any) -> Any:
        if self._plan is None:
            return None
        self.last_output = output
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, torch.Tensor):
            self._post = hidden.reshape(-1, self.hidden)
        # During the self-check SGLang's own capture is on and the stack returns a tuple that its logits processor does not expect.
        return hidden if self.observe is not None and isinstance(output, tuple) else None

    def _keep(self, b: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Copy (or add) the stream's rows into their columns: this is the clone, and gives [T, K*H] without interleaving later."""
        n, H = self._plan.rows if self._plan else 0, self.hidden
        hidden = hidden.reshape(-1, H)
        if hidden.shape[0] < n:  # scattered over ranks: rows cannot be told apart; the missing tap fails the requests
            return
        places = []
        if b in self._columns:
            k = self._columns[b]
            places.append(self._buffers[AUX][:, k * H : (k + 1) * H])
        if b == self.num_layers:
            places.append(self._buffers[FINAL_PRE])
        for place in places:
            if residual is None:
                place.copy_(hidden[:n])
            else:
                torch.add(hidden[:n], residual.reshape(-1, H)[:n], out=place)
            self._fired += 1


def plan_of(forward_batch: Any, reqs: Any, wanted: Any) -> ForwardPlan | None:
    """Which rows of this forward belong to which prompt, or None when nobody asked. ``wanted(rid)`` tells.

    Taken right after ``ForwardBatch.init_new``: later the lists can be rebound (MLP sync). P is ``len(origin_input_ids)``;
    ``orig_seq_lens`` is not P after a retraction. MIXED forwards append decode rows: clipped to [0, P).
    """
    spans, start = [], 0
    for req, n, prefix in zip(reqs, forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, strict=False):
        n, prefix = int(n), int(prefix)
        total = len(req.origin_input_ids)
        rows = min(prefix + n, total) - prefix
        # An aborted request still runs once, as [0], under its rid.
        if rows > 0 and wanted(req.rid) and req.to_finish is None and not req.finished():
            spans.append(Span(rid=req.rid, start=start, position=prefix, rows=rows, total=total))
        start += n
    return ForwardPlan(spans=tuple(spans), rows=start) if spans else None
