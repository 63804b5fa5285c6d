"""AngelSlim's offline dataset and collator.

The wheel 0.5.0 lacks ``angelslim.compressor.qat``, which ``angelslim.compressor`` imports: so the packages on the way are named without running
their ``__init__``; the modules themselves are the wheel's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections import Counter
from pathlib import Path

import torch
from dump import Dump

WAY = "angelslim.compressor.speculative.train.data.dataset_builder"
spec = importlib.util.find_spec("angelslim")
assert spec is not None and spec.submodule_search_locations
root = Path(spec.submodule_search_locations[0])
parts = WAY.split(".")
for depth in range(1, len(parts) + 1):
    package = types.ModuleType(".".join(parts[:depth]))
    package.__path__ = [str(root.joinpath(*parts[1:depth]))]
    sys.modules[package.__name__] = package

reader = importlib.import_module(f"{WAY}.offline_dataset_builder")
utils = importlib.import_module("angelslim.compressor.speculative.train.data.data_utils")

for folder, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    dump = Dump()
    data = reader.OfflineEagle3Dataset(folder)
    dump.said["files"] = [str(p) for p in data.ckpt_files]
    items = [data[i] for i in range(len(data))]
    for i, item in enumerate(items):
        dump.add(f"dataset/{i}", item)
    dump.add("batch", utils.DataCollatorWithPadding()(items))
    counts = Counter(token for item in items for token in item["input_ids"][item["loss_mask"] == 1].tolist())
    # Ties go by the order of the counts there; by the id with us.
    d2t, t2d = utils.process_token_dict_to_mappings(Counter(dict(sorted(counts.items()))), 10, 50)
    dump.add("theirs", {"d2t": d2t, "t2d": t2d})
    dump.add("ours", torch.load(Path(folder) / "vocab_mapping.pt"))  # as its draft models load it
    dump.write(out)
