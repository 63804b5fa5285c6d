"""values.schema.json, values.yaml and the reference of the chart, written from the typed values.

python -m tests.support.chart.generate       writes the first two (`make docs` writes them and the reference)
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter

from tests.support.chart.rules import SIZE, SecretKey, Section
from tests.support.chart.values import Placement, Values

CHART = Path(__file__).resolve().parents[3] / "k8s" / "statetap"
COMMAND = "make docs"


def schema() -> dict[str, Any]:
    """Draft 7, which every Helm reads, and without references: Helm's messages then name the value by its path."""
    made = Values.model_json_schema(by_alias=True)
    definitions = made.pop("$defs")

    def plain(node: Any, name: str = "") -> Any:
        if isinstance(node, list):
            return [plain(n) for n in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            node = definitions[node["$ref"].rpartition("/")[2]] | {k: v for k, v in node.items() if k != "$ref"}
        is_map = name in ("properties", "patternProperties")
        return {k: plain(v, k) for k, v in node.items() if is_map or k not in ("title", "default")}

    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart statetap", **plain(made)}


def defaults() -> dict[str, Any]:
    """values.yaml as it is read."""
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def schema_text() -> str:
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def fields(section: type[Section] | Section) -> Iterator[tuple[str, Any, Any]]:
    """(name, field, default) of a section; the default is None where the value has to be given."""
    cls = section if isinstance(section, type) else type(section)
    # What a section has in common with others comes last.
    for name, field in sorted(cls.model_fields.items(), key=lambda f: f[0] in Placement.model_fields and cls is not Values):
        default = (
            getattr(section, name)
            if isinstance(section, Section)
            else None
            if field.is_required()
            else field.get_default(call_default_factory=True)
        )
        yield field.alias or name, field, default


def section_of(field: Any, default: Any) -> type[Section] | Section | None:
    """The section that a field is: with its defaults, or its type where something in it has to be given."""
    if isinstance(default, Section):
        return default
    return field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, Section) else None


def values_text() -> str:
    """values.yaml: every default, under what it does. What has to be given stands there as a comment."""
    lines = [f"# Written by `{COMMAND}` from tests/support/chart/values.py: do not edit. Values that must be given have no default here."]

    def write(section: type[Section] | Section, indent: str) -> None:
        for name, field, default in fields(section):
            if indent == "":
                lines.append("")
            lines.extend(f"{indent}# {line}" for line in textwrap.wrap(field.description or "", 120 - len(indent)))
            if (inner := section_of(field, default)) is not None:
                lines.append(f"{indent}{name}:")
                write(inner, f"{indent}  ")
            elif field.is_required() and default is None:
                lines.append(f"{indent}# {name}:")
            else:
                lines.append(f"{indent}{name}: {json.dumps(default, ensure_ascii=False)}")

    write(Values, "")
    return "\n".join(lines) + "\n"


def rows() -> Iterator[tuple[str, Any, Any, str]]:
    """(path, field, default, description) of every value that is no section."""

    def walk(section: type[Section] | Section, path: str, what: str) -> Iterator[tuple[str, Any, Any, str]]:
        for name, field, default in fields(section):
            text = field.description or ""
            if (inner := section_of(field, default)) is not None:
                yield from walk(inner, f"{path}{name}.", f"{text} " if isinstance(inner, SecretKey) else "")
            else:
                yield f"{path}{name}", field, default, f"{what}{text}"

    yield from walk(Values, "", "")


def kind(field: Any) -> str:
    """What a value is, in words."""
    whole = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    made = TypeAdapter(whole).json_schema()
    if "enum" in made:
        return ", ".join(made["enum"])
    if "$ref" in made or made.get("type") == "object":
        return "map of texts" if made.get("additionalProperties", {}) == {"type": "string"} else "map"
    if made["type"] == "array":
        return "list of maps" if made["items"].get("type") == "object" or "$ref" in made["items"] else "list of texts"
    if made.get("pattern") == SIZE:
        return "size"
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    return ", ".join([names[made["type"]], *(f"{sign} {made[k]:g}" for k, sign in signs.items() if k in made)])


FILES = {"values.schema.json": schema_text, "values.yaml": values_text}


def main() -> None:
    for name, make in FILES.items():
        (CHART / name).write_text(make())


if __name__ == "__main__":
    main()
