"""speculators' offline dataset, its collator and the vocabulary from token_freq.pt; hs-connectors' FileTransfer for a folder of vLLM's files."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from dump import Dump
from hs_connectors import FileTransfer
from speculators.data_generation.offline import check_hidden_states, find_corrupt_hidden_state_indices, get_existing_hidden_state_indices
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

warnings.filterwarnings("error", module="speculators")  # a sample whose ids differ is dropped with a warning
for folder, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    dump = Dump()
    path = Path(folder)
    if (path / "hidden_states").is_dir():
        data = ArrowDataset(2048, path, on_missing="raise")
        indices = get_existing_hidden_state_indices(path / "hidden_states")
        dump.said["indices"], dump.said["lengths"] = indices, list(data.approx_lengths)
        dump.said["corrupt"] = len(find_corrupt_hidden_state_indices(path / "hidden_states", indices))
        items = [data[i] for i in range(len(data))]
        for i, item in enumerate(items):
            dump.add(f"dataset/{i}", item)
        width = items[0]["verifier_last_hidden_states"].shape[1]
        collate = CollateFn(64, width, dtype=items[0]["hidden_states"].dtype, preprocess=shift_batch)
        dump.add("batch", collate(items))
        counts = torch.load(path / "token_freq.pt", weights_only=True)
        dump.said["counts"] = sorted(counts.items())
        d2t, t2d = build_vocab_mappings_from_distribution(counts, 10, 50)
        dump.add("theirs", {"d2t": d2t, "t2d": t2d})
    else:
        transfer = FileTransfer(path)
        files = sorted(path.glob("*.safetensors"))
        dump.said["files"] = [str(f) for f in files]
        for i, file in enumerate(files):
            sample = transfer.get_generated({"hidden_states_path": str(file)})
            check_hidden_states(sample, sample["token_ids"].tolist())
            dump.add(f"transfer/{i}", sample)
    dump.write(out)
