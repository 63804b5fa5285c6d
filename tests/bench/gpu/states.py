"""States that a running Statetap engine captures, against transformers' fp32 forward on the same weights and GPU; sent alone against many at
once, and against an engine with another chunk size.

    python -m tests.bench.gpu.states NAME URL TAP MODEL [--other URL TAP] [--prompts 12] [--longest 1500] [--device cuda]

Prints a JSON object, and a figure each for the smallest mean cosine over boundaries and final state: gpu.states.NAME.cosine (a neighbouring
boundary's must be far lower), .together and .chunked.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn.functional import cosine_similarity

from statetap.contracts.capture import LEASE_FILE, READY_FILE, new_lease, new_rid
from statetap.contracts.profile import CaptureProfile
from statetap.contracts.tensors import AUX, FINAL_PRE
from statetap.engine.parity import Reference
from statetap.engine.selfcheck import relative
from tests.support.figures import print_figure

States = dict[int, torch.Tensor]
"""Boundary -> [T, H]."""


class Tapped:
    def __init__(self, url: str, tap: Path) -> None:
        self.url, self.tap = url, tap
        ready = json.loads((tap / READY_FILE).read_text())
        self.profile, self.self_check = CaptureProfile.from_dict(ready["profile"]), ready["self_check"]

    @contextmanager
    def lease(self) -> Iterator[str]:
        lease = new_lease()
        (self.tap / lease).mkdir()
        (self.tap / lease / LEASE_FILE).write_text("{}")
        try:
            yield lease
        finally:
            shutil.rmtree(self.tap / lease)

    def ask(self, lease: str, number: int, ids: list[int]) -> States:
        body = {"rid": new_rid(lease, number), "input_ids": ids, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        request = urllib.request.Request(f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            outcome = json.load(response)["meta_info"]["capture"]
        assert outcome["status"] == "ok" and outcome["rows"] == len(ids), outcome
        with safe_open(str(self.tap / outcome["path"]), "pt") as f:
            p = self.profile
            have = dict(zip(p.boundaries, f.get_tensor(AUX).clone().split(p.hidden, -1), strict=True))
            return have | {p.num_layers: f.get_tensor(FINAL_PRE).clone()}


def cosine(a: States, b: States) -> float:
    """The smallest mean cosine over boundaries."""
    return min(cosine_similarity(a[n].float(), b[n].float(), -1).mean().item() for n in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("url")
    parser.add_argument("tap", type=Path)
    parser.add_argument("model")
    parser.add_argument("--other", nargs=2, metavar=("URL", "TAP"))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--together", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    engine = Tapped(args.url, args.tap)
    rnd, p = random.Random(1), engine.profile
    prompts = [[rnd.randrange(10, p.vocab_size) for _ in range(rnd.randint(2, args.longest))] for _ in range(args.prompts)]
    reference = Reference(args.model)
    reference.model.to(args.device)
    told = {"right": 1.0, "shifted": -1.0, "together": 1.0, "together_other": -1.0, "chunked": 1.0}
    error = 0.0
    with engine.lease() as lease:
        alone = [engine.ask(lease, i, ids) for i, ids in enumerate(prompts)]
        with ThreadPoolExecutor(args.together) as pool:
            numbers = [i % len(prompts) for i in range(max(args.together, len(prompts)) * 2)]
            at_once = list(pool.map(lambda k: engine.ask(lease, 1000 + k, prompts[numbers[k]]), range(len(numbers))))
    for k, got in zip(numbers, at_once, strict=True):
        told["together"] = min(told["together"], cosine(got, alone[k]))
        n = min(len(prompts[k]), len(prompts[k - 1]))
        other = {b: x[:n] for b, x in alone[k - 1].items()}
        told["together_other"] = max(told["together_other"], cosine({b: x[:n] for b, x in got.items()}, other))
    if args.other:
        second = Tapped(args.other[0], Path(args.other[1]))
        with second.lease() as lease:
            told["chunked"] = min(cosine(second.ask(lease, i, ids), alone[i]) for i, ids in enumerate(prompts))
    for ids, have in zip(prompts, alone, strict=True):
        want = {b: x.float().cpu() for b, x in reference.states(ids).boundary.items()}
        told["right"] = min(told["right"], cosine(have, {b: want[b] for b in have}))
        for b, x in have.items():
            error = max(error, relative(x, want[b]))
            for n in {b - 1, b + 1} & want.keys():
                told["shifted"] = max(told["shifted"], cosine_similarity(x.float(), want[n], -1).mean().item())
    print(json.dumps({"name": args.name, **told, "relative_error": error, "self_check": engine.self_check}))
    assert told["right"] > max(0.99, told["shifted"]) and told["together_other"] < 0.9, told
    command = "python -m tests.bench.gpu.states NAME URL TAP MODEL"
    note = (
        f"SGLang {p.sglang_version}, {p.dtype}, L {p.num_layers}, boundaries {list(p.boundaries)} and final, {args.prompts} prompts of up to {args.longest} tokens; "
        f"relative error {error:.2g}; a neighbouring boundary at most {told['shifted']:.3f}, another prompt's states at most {told['together_other']:.3f}"
    )
    print_figure(f"gpu.states.{args.name}.cosine", round(told["right"], 6), "cosine", command, note)
    print_figure(
        f"gpu.states.{args.name}.together", round(told["together"], 6), "cosine", command, f"{args.together} at once against alone; {note}"
    )
    if args.other:
        print_figure(f"gpu.states.{args.name}.chunked", round(told["chunked"], 6), "cosine", command, f"against another chunk size; {note}")


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
