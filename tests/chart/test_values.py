"""Values: one source (the typed models), what the schema refuses, what renders, and nothing that is there for nobody."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from statetap import __version__
from statetap.coordinator.settings import CoordinatorSettings
from statetap.datasets.settings import Settings as IngestionSettings
from statetap.engine.flags import OURS, REFUSED
from statetap.engine.settings import EngineSettings
from statetap.worker.settings import WorkerSettings
from tests.chart.sets import BAD, FAILS, GOOD, LEAST, merged, rendered
from tests.support.chart.generate import COMMAND, FILES, defaults, rows, schema
from tests.support.chart.helm import CHART, EXAMPLES, VERSIONS, helm, template
from tests.support.chart.objects import problems
from tests.support.chart.rules import CHART_SETS
from tests.support.chart.values import Values
from tests.support.figures import print_figure

ME = "python -m pytest tests/chart/test_values.py -s"


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_chart_is_what_the_models_say(name: str) -> None:
    assert (CHART / name).read_text() == FILES[name](), f"{name} is not what the models say: run `{COMMAND}`"


def test_the_schema_is_a_schema_and_takes_the_defaults_with_what_must_be_given() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    given = defaults()
    assert [e.json_path for e in jsonschema.Draft7Validator(schema()).iter_errors(given)] == ["$.model", "$.coordinator"]
    assert "name" not in given["model"], "what must be given has no default"


def test_values_yaml_holds_the_defaults_of_the_models() -> None:
    made = Values.model_validate({"model": {"name": "x"}}).model_dump(mode="json", by_alias=True)
    del made["model"]["name"]
    assert defaults() == made


def test_versions_are_those_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__


def say(name: str, value: int, note: str) -> None:
    if os.environ.get("STATETAP_FIGURES"):
        print()  # pytest's dots stand before it
        print_figure(name, value, "value sets", f"STATETAP_FIGURES=1 {ME}", note)


def test_the_schema_refuses_what_cannot_work() -> None:
    """All bad sets in one go: each by the schema, before a template is looked at, and for its own reason."""
    wrong = []
    for name, (values, reason) in BAD.items():
        done = template(values)
        if done.returncode == 0 or "don't meet the specifications of the schema" not in done.stderr or reason not in done.stderr:
            wrong.append(f"{name}: {done.stderr[:500] or 'rendered'}")
    assert not wrong, "\n".join(wrong)
    assert len(BAD) >= 20
    say("chart.bad_values_rejected", len(BAD), "by the schema, each for its own reason")


@pytest.mark.parametrize("name", FAILS)
def test_the_templates_refuse_two_values_that_contradict(name: str) -> None:
    values, reason = FAILS[name]
    done = template(values)
    assert done.returncode != 0 and reason in done.stderr


@pytest.mark.parametrize("name", GOOD)
def test_a_good_set_renders_objects_that_are_valid_in_both_versions(name: str) -> None:
    Values.model_validate(merged(defaults(), GOOD[name]))  # and the models take what the schema takes
    for kubernetes in VERSIONS:
        objects = rendered(name, kubernetes)
        assert len(objects) >= 9
        assert [p for o in objects for p in problems(o, kubernetes)] == []
        names = [(o["kind"], o["metadata"]["name"]) for o in objects]
        assert len(set(names)) == len(names) and all(len(n) <= 63 for _, n in names)


def test_enough_good_sets() -> None:
    assert len(GOOD) >= 12 and len([n for n in GOOD if n.startswith("example")]) == 4
    say("chart.good_values_rendered", len(GOOD), f"strictly valid in Kubernetes {' and '.join(VERSIONS)}")


def test_the_strict_schemas_see_a_wrong_field_a_wrong_type_and_nothing_at_all() -> None:
    """The check itself can fail."""
    (engine,) = (o for o in rendered("least") if o["kind"] == "StatefulSet" and o["metadata"]["name"].endswith("engine"))
    for change in ({"replica": 1}, {"replicas": "many"}, {"template": None}):
        assert problems({**engine, "spec": {**engine["spec"], **change}}, VERSIONS[0])
    assert problems({**engine, "kind": "StatefullSet"}, VERSIONS[0])
    monitor = next(o for o in rendered("everything watched") if o["kind"] == "ServiceMonitor")
    assert problems({**monitor, "spec": {**monitor["spec"], "path": "/metrics"}}, VERSIONS[0])


def test_an_old_kubernetes_is_refused() -> None:
    done = template(LEAST, "1.28.0")
    assert done.returncode != 0 and "1.29" in done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_an_example_passes_lint_and_its_notes_name_what_to_do(path: Any) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    done = helm("install", "--dry-run=client", "st", str(CHART), "-n", "capture", "-f", str(path))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "STATETAP_URL=" in notes and "statetap doctor" in notes and "<no value>" not in done.stdout and "%!" not in done.stdout


def read_values() -> Iterator[str]:
    """Paths of values that a template reads, sections included."""
    text = "\n".join(p.read_text() for p in (CHART / "templates").rglob("*") if p.is_file())
    for name, path in re.findall(r"\$(\w+) := \.Values\.([\w.]+)", text):
        yield from (f"{path}.{rest}" for rest in re.findall(rf"\${name}\.([\w.]+)", text))
    yield from re.findall(r"\.Values\.([\w.]+)", text)


def test_every_value_is_read_by_a_template_and_every_value_read_is_there() -> None:
    known = {path for path, *_ in rows()}
    sections = {path[:i] for path in known for i in (m.start() for m in re.finditer(r"\.", path))}
    read = set(read_values())
    assert read - known - sections == set()
    # A section that is handed to a helper as a whole: what is in it is read there, under a dot.
    text = "\n".join(p.read_text() for p in (CHART / "templates").rglob("*") if p.is_file())
    unread = [p for p in known if p not in read and f".{p.rpartition('.')[2]}" not in text and p != "global"]
    assert unread == []


def test_every_number_has_a_bound_below_that_of_exponents() -> None:
    """Helm reads 1000000 as a float and would print 1e+06, which no setting takes."""

    def numbers(node: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, dict):
            if node.get("type") in ("integer", "number"):
                yield path, node
            for key, value in node.items():
                yield from numbers(value, f"{path}/{key}")

    found = dict(numbers(schema()["properties"], ""))
    assert len(found) > 20
    assert [p for p, n in found.items() if not n.get("maximum", 1e9) < 1e6] == []
    assert [p for p, n in found.items() if not n.get("minimum", -1) >= 0] == []


def test_flags_that_the_engine_refuses_are_refused_by_the_schema() -> None:
    rule = schema()["properties"]["engine"]["properties"]["sglang"]["items"]["not"]["pattern"]
    for flag in {**REFUSED, **OURS}:
        assert re.search(rule, flag) and re.search(rule, f"{flag}=1")
    for flag in ("--mem-fraction-static", "--tp-something", "2", "--model-impl"):
        assert not re.search(rule, flag)


def test_a_variable_that_the_chart_sets_is_a_setting_and_is_closed_to_the_values() -> None:
    of = {"coordinator": CoordinatorSettings, "ingest": IngestionSettings, "worker": WorkerSettings}
    seen: dict[str, set[str]] = {s: set() for s in CHART_SETS}
    for name in GOOD:
        for item in rendered(name):
            if item["kind"] not in ("Deployment", "StatefulSet"):
                continue
            pod = item["spec"]["template"]["spec"]
            for c in [*pod.get("initContainers", ()), *pod["containers"]]:
                service = c["name"].split("-")[0]
                names = [e["name"] for e in c.get("env", ())]
                assert len(names) == len(set(names)), (name, c["name"])
                given = GOOD[name].get({"worker": "workers"}.get(service, service), {}).get("env", {})
                seen.get(service, set()).update(n.removeprefix("STATETAP_") for n in names if n.startswith("STATETAP_") and n not in given)
    for service, model in of.items():
        assert seen[service] == set(CHART_SETS[service].split())
        assert {n.lower() for n in seen[service]} <= set(model.model_fields)
    assert seen["engine"] == set(CHART_SETS["engine"].split()) == {"ENGINE_RING_BYTES"}
    assert "ring_bytes" in EngineSettings.__dataclass_fields__


def test_a_variable_of_ones_own_reaches_its_service_only() -> None:
    for item in rendered("three workers"):
        text = json.dumps(item)
        assert ("STATETAP_CIRCUIT_FAILURES" in text) == (item["metadata"]["name"].endswith("engine") and item["kind"] == "StatefulSet")
