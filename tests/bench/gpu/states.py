"""States that a running Statetap engine captures against transformers' fp32 forward on the same weights.

    python -m tests.bench.gpu.states URL TAP MODEL [--prompts 12] [--longest 700] [--device cuda]

Prints one JSON object: the smallest cosine over boundaries and final state (mean over tokens), the largest relative error, and the
largest cosine to a neighbouring boundary (a control that must be far lower).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import urllib.request
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn.functional import cosine_similarity

from statetap.contracts.capture import LEASE_FILE, READY_FILE, new_lease, new_rid
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.tensors import AUX, FINAL_PRE
from statetap.engine.parity import Reference
from statetap.engine.selfcheck import relative


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("tap", type=Path)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--longest", type=int, default=700)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    profile = CaptureProfile.from_dict(json.loads((args.tap / READY_FILE).read_text())["profile"])
    reference = Reference(args.model)
    reference.model.to(args.device)
    rnd = random.Random(1)
    lease = new_lease()
    (args.tap / lease).mkdir()
    (args.tap / lease / LEASE_FILE).write_text("{}")
    cosine, error, control = 1.0, 0.0, -1.0
    try:
        for i in range(args.prompts):
            ids = [rnd.randrange(10, profile.vocab_size) for _ in range(rnd.randint(2, args.longest))]
            body = {"rid": new_rid(lease, i), "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
            request = urllib.request.Request(f"{args.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as response:
                outcome = json.load(response)["meta_info"]["capture"]
            assert outcome["status"] == "ok", outcome
            with safe_open(str(args.tap / outcome["path"]), "pt") as f:
                have = dict(zip(profile.boundaries, f.get_tensor(AUX).split(profile.hidden, -1), strict=True))
                if profile.final in ("pre", "both"):
                    have[profile.num_layers] = f.get_tensor(FINAL_PRE)
            want = {b: x.float().cpu() for b, x in reference.states(ids).boundary.items()}
            for b, x in have.items():
                cosine = min(cosine, cosine_similarity(x.float(), want[b], -1).mean().item())
                error = max(error, relative(x, want[b]))
                control = max(control, *(cosine_similarity(x.float(), want[n], -1).mean().item() for n in (b - 1, b + 1) if n in want))
    finally:
        shutil.rmtree(args.tap / lease)
    print(json.dumps({"prompts": args.prompts, "min_cosine": cosine, "max_relative_error": error, "max_shifted_cosine": control}))


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
