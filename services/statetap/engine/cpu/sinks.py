"""Attention with sinks, sliding windows and grouped heads in plain torch, one request at a time: a reference, slow and exact.

A sink is one logit a head that takes part in the softmax and has no value (gpt-oss): softmax([q.k, sink])[:-1] @ v.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class SinkBackend(TorchNativeAttnBackend):
    """torch_native's bookkeeping (pools, cache locations) with an attention of its own. Causal self-attention only."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None, **_: Any
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, forward_batch.extend_seq_lens.tolist(), save_kv_cache, sinks)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, sinks: Any = None, **_: Any
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer, forward_batch, [1] * len(forward_batch.seq_lens), save_kv_cache, sinks)

    def _attend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, new: list[int], save_kv_cache: bool, sinks: Any
    ) -> torch.Tensor:
        """q [rows, heads * D] -> [rows, heads * D_v]; ``new``: the rows of each request."""
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        heads, group = layer.tp_q_head_num, layer.tp_q_head_num // layer.tp_k_head_num
        query = q.reshape(-1, heads, layer.qk_head_dim)
        out, start = query.new_empty((query.shape[0], heads, layer.v_head_dim)), 0
        for request, total, n in zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), new, strict=True):
            places = self._places(layer, request, total)
            key = keys[places].float().repeat_interleave(group, 1)
            value = values[places].float().repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", query[start : start + n].float(), key) * layer.scaling
            at, of = torch.arange(total - n, total)[:, None], torch.arange(total)[None]
            seen = of <= at
            if (window := layer.sliding_window_size) is not None and window > -1:
                seen = seen & (of >= at - window)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], -1)
            weights = scores.softmax(-1)[..., :total]
            out[start : start + n] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
            start += n
        return out.reshape(-1, heads * layer.v_head_dim)

    def _places(self, layer: Any, request: int, total: int) -> torch.Tensor:
        """Where a request's keys lie in this layer's cache (layers with a window may have a cache of their own)."""
        places = self.req_to_token_pool.req_to_token[request, :total]
        pool = self.token_to_kv_pool
        windowed = self.use_sliding_window_kv_pool and pool.layers_mapping.get(layer.layer_id, (0, False))[1]
        return (pool.translate_loc_from_full_to_swa(places) if windowed else places).long()
