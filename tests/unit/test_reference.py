"""docs/reference says what the code says, and all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from statetap.contracts.errors import ErrorCode
from statetap.coordinator.settings import CoordinatorSettings
from statetap.datasets.settings import Settings as IngestionSettings
from statetap.engine.settings import EngineSettings
from statetap.worker.settings import WorkerSettings
from tests.support.reference import COMMAND, FOLDER, PAGES, commands, document, operations

ROOT = Path(__file__).parents[2]


def page(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_generator_makes_now(name: str) -> None:
    path = FOLDER / f"{name}.md"
    assert path.exists() and path.read_text() == PAGES[name](), f"docs/reference/{name}.md is not what the code says: run `{COMMAND}`"


def test_nothing_else_lies_there_and_the_readme_leads_to_it() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {f"{name}.md" for name in PAGES}
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/reference/{name}.md" in readme for name in PAGES)


def test_it_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    """Another folder, another environment, another hash seed: settings of this host must not get into it."""
    code = "from tests.support import reference as r; import sys; sys.stdout.write(''.join(r.PAGES[n]() for n in sorted(r.PAGES)))"
    env = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}",
        "PYTHONHASHSEED": "7",
        "STATETAP_PORT": "1",
        "STATETAP_STORE": "/elsewhere",
        "COLUMNS": "40",
        "PATH": "",
    }
    made = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert made.stdout == "".join(PAGES[n]() for n in sorted(PAGES))
    assert "/elsewhere" not in made.stdout and str(Path.home()) + "/" not in made.stdout and sys.prefix not in made.stdout


def test_every_setting_is_named_with_what_it_does() -> None:
    text = page("settings")
    for prefix, names in (
        ("STATETAP_", [*CoordinatorSettings.model_fields, *IngestionSettings.model_fields, *WorkerSettings.model_fields]),
        ("STATETAP_ENGINE_", [*EngineSettings.__dataclass_fields__]),
    ):
        for name in names:
            assert re.search(rf"^\| `{prefix}{name.upper()}` \|.*\| [^|]+ \|$", text, re.M), name


def test_every_variable_that_the_code_speaks_of_is_in_the_reference() -> None:
    known = page("settings") + page("cli")
    for path in (ROOT / "services").rglob("*.py"):
        for name in set(re.findall(r"\bSTATETAP_[A-Z_]*[A-Z]\b", path.read_text())) - {"STATETAP_ENGINE"}:
            assert f"`{name}`" in known, f"{path.name} speaks of {name}"


def test_every_operation_command_code_and_metric_is_named() -> None:
    text = page("api")
    every = operations(document())
    assert len(every) > 20
    for method, path, _ in every:
        assert f"## {method} {path}\n" in text
    assert all(f"| `{code.value}` |" in page("errors") for code in ErrorCode)
    verbs = [name for name, _ in commands()]
    assert {"statetap up", "statetap run", "statetap submit", "statetap keys add"} <= set(verbs)
    for name, command in commands():
        assert f"\n## {name}\n" in page("cli")
        assert command.help, f"{name} says nothing of itself"
        section = page("cli").partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert all(
            f"`{o}`" in section for p in command.params if not p.hidden and p.param_type_name == "option" for o in p.opts if o != "--help"
        )
    from statetap.coordinator.metrics import METRICS
    from statetap.engine.metrics import METRICS as ENGINE

    assert all(f"| `{m.name}` |" in page("metrics") for m in (*METRICS, *ENGINE.values()))


def test_every_link_to_a_schema_leads_to_one() -> None:
    text = page("api")
    headings = {h.lower() for h in re.findall(r"^### (\w+)$", text, re.M)}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= headings
