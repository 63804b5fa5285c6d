"""What the documents say is in the tree: figures, commands, settings and error codes."""

from __future__ import annotations

import json
import re
import subprocess

from tests.support.figures import BEGIN, END, FIGURES, KEYS, README, readme_table

ROOT = README.parent


def test_every_figure_is_whole_and_named_once() -> None:
    figures = json.loads(FIGURES.read_text())
    assert all(set(f) == set(KEYS) and all(f[k] != "" for k in KEYS[:-1]) for f in figures)
    names = [f["name"] for f in figures]
    assert names == sorted(set(names))
    bench = {"commit_over_copy", "rows_per_s", "fsyncs_per_row", "ingest_rss_mib", "submit_to_prefill_s"}
    service = {"small_job_ratio", "eta_error", "pause_s", "undocumented_5xx", "status_p99_ms"}
    wanted = {f"bench.{n}" for n in bench} | {f"service.{n}" for n in service}
    assert wanted | {"demo.max_rel_error", "demo.rows"} <= set(names)


def test_the_readmes_figures_are_those_of_the_file() -> None:
    shown = README.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == readme_table()


def test_a_figures_command_names_a_module_or_file_of_the_tree() -> None:
    for f in json.loads(FIGURES.read_text()):
        command = re.sub(r"^(\w+=\S+ )*(python -m pytest (-\w+ )*)?", "", f["command"])
        if command.startswith("tests/"):
            assert (ROOT / command.split()[0]).exists(), f["command"]
            continue
        if target := re.fullmatch(r"make (\S+)", command):
            assert f"\n{target[1]}:" in (ROOT / "Makefile").read_text(), f["command"]
            continue
        module = re.match(r"python -m (\S+)", command)
        path = module[1].replace(".", "/") + ".py" if module else f["command"].split()[1]
        assert (ROOT / path).exists(), f["command"]


def test_links_between_documents_lead_somewhere() -> None:
    for page in [README, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_files_that_the_way_of_a_sample_names_are_there() -> None:
    text = (ROOT / "docs" / "way-of-a-sample.md").read_text()
    for row in re.findall(r"\| (`[^|]+) \|$", text, re.M):
        folder = ""
        for name in re.findall(r"`([^`]+)`", row):
            folder = name.rpartition("/")[0] or folder
            assert (ROOT / "services/statetap" / folder / name.rpartition("/")[2]).exists(), name


def test_make_help_lists_the_targets_of_the_readme() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in set(re.findall(r"`?make ([a-z]+)", README.read_text())):
        assert re.search(rf"^{target}\s", listed, re.M), target


def test_the_tests_that_the_table_of_traps_names_are_there() -> None:
    text = (ROOT / "docs" / "engine-traps.md").read_text()
    named = re.findall(r"`(\w+/\w+\.py)::(\w+)`", text)
    assert len(named) > 25
    for path, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / "tests" / path).read_text(), re.M), f"{path}::{test}"
