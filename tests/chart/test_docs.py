"""docs/howto/cluster.md: its commands run here, or say that they need a cluster; what it names is there."""

from __future__ import annotations

import re
import shlex

import pytest

from statetap.cli.main import app
from tests.chart.sets import BAD, GOOD
from tests.support.chart.generate import rows
from tests.support.chart.helm import EXAMPLES, ROOT, VERSIONS, fetch, helm

PAGE = (ROOT / "docs" / "howto" / "cluster.md").read_text()
BLOCKS = re.findall(r"(<!-- needs a cluster -->\n)?```bash\n(.*?)```", PAGE, re.S)
ALL = [shlex.split(line, comments=True) for _, block in BLOCKS for line in block.splitlines()]
HERE = [line for mark, block in BLOCKS if not mark for line in block.splitlines()]


@pytest.mark.parametrize("line", HERE)
def test_a_command_that_needs_no_cluster_runs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(line)
    assert program == "helm"
    done = helm(*arguments)
    assert done.returncode == 0, done.stderr


def test_a_command_that_needs_a_cluster_names_files_and_verbs_that_are_there() -> None:
    assert len(HERE) == 2 and len(ALL) > 8
    for command in ALL:
        assert command[0] in ("helm", "kubectl", "statetap")
        for argument in command:
            if argument.startswith("k8s/"):
                assert (ROOT / argument).exists()
        if command[0] == "helm":
            verb = next(a for a in command[1:] if a in ("install", "upgrade", "rollback", "uninstall", "test", "lint", "template"))
            assert helm(verb, "--help").returncode == 0
        if command[:2] == ["statetap", "keys"]:
            assert "keys" in {g.name for g in app.registered_groups}


def test_values_and_examples_that_the_page_names_are_there() -> None:
    known = {path for path, *_ in rows()}
    sections = {p[: m.start()] for p in known for m in re.finditer(r"\.", p)}
    named = set(re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)(?::[^`]*)?`", PAGE))
    assert len(named) > 20 and named <= known | sections
    for name in ("keep", "maxReplicas", "scaleDownSeconds", "allowNoAuth"):
        assert f"`{name}`" in PAGE and name in {p.rpartition(".")[2] for p in known}
    for example in EXAMPLES.glob("*.yaml"):
        assert f"[{example.stem}](../../k8s/examples/{example.name})" in PAGE


def test_what_it_says_was_tested_is_what_is_tested() -> None:
    assert f"Kubernetes {VERSIONS[0]} and {VERSIONS[1]}" in PAGE
    assert len(BAD) + len(GOOD) > 50
    assert "Helm 4" in PAGE and helm("version", "--short").stdout.startswith("v4.")
    assert (fetch() / "helm").stat().st_mode & 0o111
