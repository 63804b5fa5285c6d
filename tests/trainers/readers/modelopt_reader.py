"""ModelOpt's offline dataset and collator, over the files that its eagle_utils.py finds (``rglob("*.pt")``)."""

from __future__ import annotations

import sys
from pathlib import Path

from dump import Dump
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

for folder, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    dump = Dump()
    files = sorted(str(p) for p in Path(folder).rglob("*.pt"))
    dump.said["files"] = files
    data = OfflineSupervisedDataset(files, answer_only_loss=True)
    items = [data[i] for i in range(len(data))]
    for i, item in enumerate(items):
        dump.add(f"dataset/{i}", item)
    batch = EagleOfflineDataCollator(train_len=6)(items)
    states = batch.pop("base_model_outputs")
    dump.add("batch", batch | states)
    dump.write(out)
