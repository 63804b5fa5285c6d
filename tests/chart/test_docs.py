"""docs/howto: the commands of helm run here, or say that they need a cluster; values render; what cluster.md names is there.

What holds for every command of these pages: tests/unit/test_howto.py.
"""

from __future__ import annotations

import re

import pytest
import yaml

from tests.chart.sets import BAD, GOOD, merged
from tests.support.chart.helm import EXAMPLES, ROOT, VERSIONS, fetch, helm, render
from tests.support.howto import FOLDER, PAGES, blocks, commands, spans, values

PAGE = (FOLDER / "cluster.md").read_text()
HELM = [c for p in PAGES for c in commands(p.read_text()) if c.begins("helm")]
HERE = [c for c in HELM if not c.needs]
VALUES = [(p.name, b) for p in PAGES for b in blocks(p.read_text(), "yaml") if "services:" not in b]


@pytest.mark.parametrize("words", [c.words for c in HERE], ids=" ".join)
def test_a_command_that_needs_no_cluster_runs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = helm(*words[1:])
    assert done.returncode == 0, done.stderr


def test_a_command_that_needs_a_cluster_has_a_verb_and_options_that_helm_has() -> None:
    assert len(HERE) > 2 and len(HELM) > 8
    named = [(c.words, c.text) for c in HELM] + [(s.split(), s) for p in PAGES for s in spans(p.read_text()) if s.startswith("helm ")]
    for words, text in named:
        verb = next(w for w in words[1:] if re.fullmatch("[a-z]+", w) and w != "capture")
        said = helm(verb, "--help")
        assert said.returncode == 0 and f"helm {verb} " in said.stdout, text
        for option in (w for w in words if w.startswith("-")):
            assert re.search(rf"(^|[ ,]){option}\b", said.stdout, re.M), f"{text}: {option}"


@pytest.mark.parametrize("block", [b for _, b in VALUES], ids=[n for n, _ in VALUES])
def test_values_of_a_page_render_over_an_example(block: str) -> None:
    assert render(merged(GOOD["example single-gpu"], yaml.safe_load(block)))


def test_examples_and_values_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)(?::[^`]*)?`", PAGE))
    assert len(named) > 20, "that they are values, tests/unit/test_howto.py sees"
    last = {path.rpartition(".")[2] for path in values()}
    for name in ("keep", "maxReplicas", "scaleDownSeconds", "allowNoAuth"):
        assert f"`{name}`" in PAGE and name in last
    for example in EXAMPLES.glob("*.yaml"):
        assert f"[{example.stem}](../../k8s/examples/{example.name})" in PAGE


def test_what_it_says_was_tested_is_what_is_tested() -> None:
    assert f"Kubernetes {VERSIONS[0]} and {VERSIONS[1]}" in PAGE
    assert len(BAD) + len(GOOD) > 50
    assert "Helm 4" in PAGE and helm("version", "--short").stdout.startswith("v4.")
    assert (fetch() / "helm").stat().st_mode & 0o111
