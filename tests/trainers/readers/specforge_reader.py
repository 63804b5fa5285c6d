"""SpecForge's offline path, both ages of it: manifest reader, store, loader and normaliser; and OfflineEagle3Dataset."""

from __future__ import annotations

import sys
from collections import Counter

import torch
from dump import Dump
from specforge.algorithms.eagle3.data import build_offline_normalizer, build_offline_reader
from specforge.data.preprocessing import build_offline_eagle3_dataset, process_token_dict_to_mappings
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader, list_feature_files
from specforge.training.vocab_mapping import count_effective_feature_tokens

MAX_LENGTH = 2048

for folder, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    dump = Dump()
    files = list_feature_files(folder)
    dump.said["files"] = files
    OfflineManifestReader(folder, validate_files=True).read()  # opens each file and looks at keys and types
    refs = build_offline_reader(folder, run_id="test", ttt_length=7, max_len=MAX_LENGTH).read()
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=refs,
        batch_size=1,
        per_sample_transform=build_offline_normalizer(MAX_LENGTH),
        collate_fn=lambda features: features[0],
    )
    for i, batch in enumerate(loader):
        dump.add(f"loader/{i}", dict(batch.tensors))
    data = build_offline_eagle3_dataset(folder, max_len=MAX_LENGTH)
    for i in range(len(data)):
        dump.add(f"dataset/{i}", data[i])
    for i, file in enumerate(files):
        dump.add(f"raw/{i}", load_feature_file(file))
    counts = count_effective_feature_tokens(folder)
    dump.said["counts"] = sorted(counts.items())
    # Ties go by the order of the counts there; by the id with us.
    d2t, t2d = process_token_dict_to_mappings(Counter(dict(sorted(counts.items()))), 10, 50)
    dump.add("theirs", {"d2t": d2t, "t2d": t2d})
    dump.add("ours", torch.load(f"{folder}/vocab_mapping/vocab_mapping.pt", weights_only=True))
    dump.write(out)
