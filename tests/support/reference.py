"""docs/reference/*.md, written from the code: the API from its OpenAPI, the command line from its commands, settings, errors, metrics
and the chart's values from where they are declared. The result depends on the code alone: no paths, versions, times or number of cores.

python -m tests.support.reference        writes the pages (`make docs`)
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
COMMAND = "make docs"
MADE = f"<!-- Written by `{COMMAND}` from the code: do not edit. -->"


def cell(text: object) -> str:
    """Text that stands in a table: one line, no column of its own."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(head: str, rows: Iterable[Iterable[object]]) -> list[str]:
    names = [n.strip() for n in head.split("|")]
    body = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names), *body, ""] if body else []


def type_name(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(map(str, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(a) for a in arguments if a is not type(None))
    if origin is tuple or origin is list:
        return f"list of {type_name(arguments[0])}"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return ", ".join(str(m.value) for m in annotation)
    names = {"str": "text", "SecretStr": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}
    plain = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return names.get(plain, plain)


# settings


def settings() -> str:
    """All settings of all services, by service."""
    from statetap.coordinator.settings import CoordinatorSettings
    from statetap.datasets.settings import Settings as IngestionSettings
    from statetap.engine.settings import PREFIX, EngineSettings
    from statetap.worker.settings import WorkerSettings

    lines = ["Every setting is an environment variable, read once at the start of its service.", ""]
    for title, start, model in (
        ("Coordinator", "python -m statetap.coordinator", CoordinatorSettings),
        ("Ingestion", "python -m statetap.datasets", IngestionSettings),
        ("Worker", "python -m statetap.worker", WorkerSettings),
    ):
        prefix = str(model.model_config["env_prefix"])
        rows = []
        for name, field in model.model_fields.items():
            bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in _BOUNDS.items() if hasattr(m, key)]
            what = ", ".join([type_name(field.annotation), *bounds])
            rows.append((f"`{prefix}{name.upper()}`", what, default_text(field.default), field.description or ""))
        lines += [f"## {title}", "", f"`{start}`", "", *table("Variable | Value | Default | What it does", rows)]
    documented = _field_docs(EngineSettings)
    rows = [
        (f"`{PREFIX}{name.upper()}`", type_name(field.type), default_text(field.default), documented[name])
        for name, field in EngineSettings.__dataclass_fields__.items()
    ]
    lines += ["## Engine", "", "Set by the launcher (`statetap up`) for the processes of SGLang.", ""]
    lines += table("Variable | Value | Default | What it does", rows)
    lines += ["## Client and command line", "", "Options of a command that have a variable stand with [the command](cli.md).", ""]
    return page("Settings", [*lines, *table("Variable | What it does", CLIENT)])


CLIENT = [
    ("`STATETAP_URL`", "Root of the coordinator's API. Default: `http://127.0.0.1:8700`."),
    ("`STATETAP_API_KEY`", "The key that the client library and the command line send. It is never an option, which `ps` would show."),
]


_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def default_text(value: Any) -> str:
    if hasattr(value, "get_secret_value"):
        value = value.get_secret_value()
    if value is None or value == "" or value == ():
        return "unset"
    if isinstance(value, enum.Enum):
        value = value.value
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _field_docs(cls: type) -> dict[str, str]:
    """Field -> the docstring that stands behind it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for before, here in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(here, ast.Expr):
            assert isinstance(here.value, ast.Constant)
            found[before.target.id] = str(here.value.value)
    return found


# errors


def errors() -> str:
    from statetap.contracts.errors import SPECS

    text = (
        "Every problem has a code: in answers of the API (RFC 9457, `application/problem+json`), in the ledger of a job, and at the command "
        "line. `retryable` says whether the same thing can succeed later."
    )
    rows = [(f"`{code.value}`", spec.status, "yes" if spec.retryable else "no", spec.next_step) for code, spec in SPECS.items()]
    return page("Error codes", [text, "", *table("Code | HTTP status | Retryable | What to do next", rows)])


# metrics


def metrics() -> str:
    from statetap.coordinator.metrics import METRICS
    from statetap.engine.metrics import METRICS as ENGINE

    head = "Name | Type | Labels | What it is"
    lines = ["## Coordinator", "", "`GET /metrics` of the coordinator, in Prometheus' text format.", ""]
    lines += table(head, [(f"`{m.name}`", m.type, ", ".join(f"`{label}`" for label in m.labels), m.help) for m in METRICS])
    lines += [
        "## Engine",
        "",
        "`GET /statetap/metrics` of an engine, in the same format. SGLang's own are at its `/metrics`, with `--enable-metrics`. The counts "
        "begin with the engine, and those of the scheduler's process are half a second old at most.",
        "",
    ]
    lines += table(head, [(f"`{m.name}`", m.type, f"`{m.label}`" if m.label else "", m.help) for m in ENGINE.values()])
    return page("Metrics", lines)


# command line


def commands() -> list[tuple[str, Any]]:
    """(name, command) of every verb, in order of their names."""
    import typer

    from statetap.cli.main import app

    found: list[tuple[str, Any]] = []

    def walk(command: Any, name: str) -> None:
        for key, child in sorted(getattr(command, "commands", {}).items()):
            walk(child, f"{name} {key}")
        if not hasattr(command, "commands"):
            found.append((name, command))

    walk(typer.main.get_command(app), "statetap")
    return found


def cli() -> str:
    from statetap.cli.exits import Exit

    lines = ["Every command has `--help`. Data goes to stdout, everything else to stderr.", ""]
    for name, command in commands():
        arguments = [p for p in command.params if p.param_type_name == "argument" and not p.hidden]
        usage = " ".join([name, *(_argument(p) for p in arguments), "[options]"])
        lines += [f"## {name}", "", f"`{usage}`", "", *_paragraphs(command.help or ""), ""]
        rows = [
            (
                ", ".join(f"`{o}`" for o in [*p.opts, *p.secondary_opts]) if p.param_type_name == "option" else f"`{_argument(p)}`",
                "" if getattr(p, "is_flag", False) else _values(p),
                "required" if p.required else _default(p),
                f"`{p.envvar}`" if p.envvar else "",
                p.help or "",
            )
            for p in sorted(command.params, key=lambda p: p.param_type_name)  # arguments first, else as declared
            if not p.hidden and p.name != "help"
        ]
        lines += table("Option | Value | Default | Variable | What it does", rows)
    lines += ["## Exit codes", "", *table("Code | Meaning", [(int(e), e.name.lower().replace("_", " ")) for e in Exit])]
    return page("Command line", lines)


def _argument(param: Any) -> str:
    name = (param.metavar or param.name).upper()
    many = param.nargs == -1 and not name.endswith("…")
    return f"{name}…" if many else name


def _values(param: Any) -> str:
    what = type_name(param.type_descriptor.annotation)
    bounds = [f"{sign} {v}" for sign, v in (("≥", param.min), ("≤", param.max)) if v is not None]
    return ", ".join([what, *bounds])


def _default(param: Any) -> str:
    if isinstance(param.show_default, str):
        return f"`{param.show_default}`"
    if getattr(param, "is_flag", False) or param.default is None or param.default in ("", (), []) or callable(param.default):
        return ""
    return default_text(param.default)


def _paragraphs(text: str) -> list[str]:
    return inspect.cleandoc(text).replace("\f", "").splitlines()


# API


def document() -> dict[str, Any]:
    from statetap.coordinator.app import create_app
    from statetap.coordinator.settings import CoordinatorSettings

    return create_app(CoordinatorSettings.model_construct()).openapi()  # defaults alone, whatever this environment sets


def operations(openapi: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(METHOD, path, operation), by path."""
    order = ["get", "head", "post", "put", "patch", "delete"]
    return [(m.upper(), path, methods[m]) for path, methods in sorted(openapi["paths"].items()) for m in order if m in methods]


def api() -> str:
    openapi = document()
    lines = [
        f"{openapi['info'].get('summary', '')} The same as a document: `GET /openapi.json`.",
        "",
        "A key goes into `Authorization: Bearer st_…`; what each operation asks of it stands with it (read < write < admin). Without a keys file "
        "nothing is asked, on loopback only. Every refusal is a [problem](errors.md).",
        "",
    ]
    for method, path, operation in operations(openapi):
        lines += [f"## {method} {path}", "", *_operation(operation)]
    lines += ["## Schemas", ""]
    for name, schema in sorted(openapi["components"]["schemas"].items()):
        lines += [f"### {name}", "", *_paragraphs(schema.get("description", ""))]
        if schema.get("description"):
            lines.append("")
        if "enum" in schema:
            lines += ["One of " + ", ".join(f"`{v}`" for v in schema["enum"]) + ".", ""]
        lines += _fields(schema)
    return page("API", lines)


def _operation(operation: dict[str, Any]) -> list[str]:
    lines = [f"**{operation['summary']}.** Scope: {operation.get('x-statetap-scope', 'none, it is open')}.", ""]
    if operation.get("description"):
        lines += [*_paragraphs(operation["description"]), ""]
    rows = [
        (f"`{p['name']}`", p["in"], schema_name(p["schema"]), "required" if p.get("required") else "", p.get("description", ""))
        for p in operation.get("parameters", [])
    ]
    lines += table("Parameter | In | Value | | What it is", rows)
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content.get("schema", {})
        lines += [f"Body, `{kind}`: {schema_name(schema)}", ""]
        lines += _fields(schema)
    for status, response in sorted(operation["responses"].items()):
        if status >= "400":
            continue
        content = response.get("content") or {}
        what = ", ".join(f"`{kind}`: {schema_name(c.get('schema', {}))}" for kind, c in content.items())
        lines += [f"{status}: {cell(response.get('description', ''))}{', ' + what if what else ''}", ""]
    problems = [s for s in sorted(operation["responses"]) if s >= "400"]
    return [*lines, f"Problems: {', '.join(problems)}", ""]


def _fields(schema: dict[str, Any]) -> list[str]:
    wanted = set(schema.get("required", ()))
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = (
            "required"
            if name in wanted
            else f"`{str(d).lower() if isinstance(d, bool) else d}`"
            if (d := field.get("default")) not in (None, "")
            else ""
        )
        rows.append((f"`{name}`", schema_name(field), default, field.get("description", "")))
    return table("Field | Value | Default | What it is", rows)


def schema_name(schema: dict[str, Any]) -> str:
    """A JSON schema in words; one of the components by a link."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(schema_name(s) for s in schema[key])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{v}`" for v in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {schema_name(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {schema_name(schema['additionalProperties'])}"
    # FastAPI writes limits as floats.
    limits = [f"{sign} {int(v) if float(v).is_integer() else v}" for k, sign in _LIMITS.items() if (v := schema.get(k)) is not None]
    return ", ".join([str(kind), *limits])


_LIMITS = {
    "minimum": "≥",
    "maximum": "≤",
    "exclusiveMinimum": ">",
    "exclusiveMaximum": "<",
    "minLength": "length ≥",
    "maxLength": "length ≤",
}


# chart


def chart() -> str:
    """The values of the Helm chart, by section."""
    from tests.support.chart.generate import kind, rows

    lines = [
        "Values of `k8s/statetap`; how to use them: [a cluster](../howto/cluster.md). `values.schema.json` refuses what is not here, and combinations "
        "that cannot work. Sizes are in Mi, Gi or Ti.",
        "",
    ]
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for path, field, default, text in rows():
        shown = "required" if field.is_required() and default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        sections.setdefault(path.partition(".")[0] if "." in path else "", []).append((f"`{path}`", kind(field), shown, text))
    for section, entries in [*((k, v) for k, v in sections.items() if k), ("All", sections[""])]:
        lines += [f"## {section}", "", *table("Value | Type | Default | What it does", entries)]
    return page("Chart", lines)


# pages


def page(title: str, lines: list[str]) -> str:
    return "\n".join([MADE, "", f"# {title}", "", *lines]).rstrip() + "\n"


PAGES: dict[str, Callable[[], str]] = {"api": api, "cli": cli, "settings": settings, "errors": errors, "metrics": metrics, "chart": chart}


def main() -> None:
    from tests.support.chart import generate

    generate.main()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / f"{name}.md").write_text(make())


if __name__ == "__main__":
    main()
