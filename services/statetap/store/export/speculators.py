"""speculators (vLLM): ``hidden_states/hs_{i}.safetensors`` beside a Hugging Face dataset on disk whose row i it belongs to, and token_freq.pt.

Read by ``ArrowDataset`` of speculators 0.9.0 through ``FileTransfer`` of hs-connectors 0.9.0; a row whose ids are not those of its file is dropped there.
The dataset's files are written as ``Dataset.save_to_disk`` does: one Arrow stream and two small JSON files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch

from ..fs import to_json
from .base import Finish, Item
from .files import NewFile, put, write_file
from .vllm import VllmFormat
from .vocab import Counts

ARROW = "data-00000-of-00001.arrow"
STATE = "state.json"
INFO = "dataset_info.json"
FREQUENCIES = "token_freq.pt"
ROWS_PER_BATCH = 256  # of the Arrow stream: what is in memory at once

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())])


class Speculators(VllmFormat):
    """The rows' files are vLLM's. ``i`` counts the exported rows, since the dataset has no gaps."""

    name = "speculators"
    title = "speculators"

    def path(self, item: Item) -> str:
        return f"hidden_states/hs_{item.index}.safetensors"

    def side_files(self, finish: Finish) -> list[str]:
        counts = Counts()
        file = NewFile(finish.out)
        try:
            with pa.ipc.new_stream(file, SCHEMA) as stream:
                for batch in _batches(finish, counts):
                    stream.write_batch(batch)
            _, xxh3 = file.finish()
            put(file, finish.out / ARROW)
        finally:
            file.abandon()
        frequencies = io.BytesIO()
        torch.save(counts.by_token, frequencies)
        write_file(finish.out, FREQUENCIES, frequencies.getvalue())
        write_file(finish.out, INFO, to_json({}))  # features are read from the Arrow schema: their JSON differs between versions
        state: dict[str, Any] = {
            "_data_files": [{"filename": ARROW}],
            "_fingerprint": xxh3,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        write_file(finish.out, STATE, to_json(state))
        return [ARROW, FREQUENCIES, INFO, STATE]


def _batches(finish: Finish, counts: Counts) -> Iterator[pa.RecordBatch]:
    columns: dict[str, list[object]] = {name: [] for name in SCHEMA.names}
    for _, ids, mask in finish.tokens():
        counts.add(ids, mask)
        for name, value in (("input_ids", ids), ("loss_mask", mask), ("seq_len", len(ids))):
            columns[name].append(value)
        if len(columns["seq_len"]) == ROWS_PER_BATCH:
            yield pa.record_batch(columns, schema=SCHEMA)
            columns = {name: [] for name in SCHEMA.names}
    if columns["seq_len"]:
        yield pa.record_batch(columns, schema=SCHEMA)
