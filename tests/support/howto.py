"""The pages of docs/howto as data: the commands in their blocks and in their sentences, and what is not as it should be.

The rule: each command is run by a test, or says that it needs a GPU or a cluster. ``problems`` holds a page against it, and against the
tree: options, files, environment variables, values of the chart, figures, links.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from statetap.contracts.errors import StatetapError
from statetap.engine.flags import OURS, REFUSED, REFUSED_ENVIRONMENT, check_flags
from tests.support import reference
from tests.support.chart.generate import rows

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "howto"
PAGES = sorted(FOLDER.glob("*.md"))

CHART = "tests/chart/test_docs.py"
STACK = "tests/containers/test_stack.py"
UP = f"{STACK}::test_everything_comes_up_healthy_and_closed"
RUN_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "helm lint": (f"{CHART}::test_a_command_that_needs_no_cluster_runs", ("helm(*words[1:])",)),
    "helm template": (f"{CHART}::test_a_command_that_needs_no_cluster_runs", ("helm(*words[1:])",)),
    "docker compose --profile cpu up --wait": (UP, ('"--profile", "cpu"', '"up", "--wait"')),
    "docker compose up": (UP, ('"up", "--wait"',)),
    "docker compose build": (UP, ('"build", "coordinator"',)),
    "docker compose logs": (UP, ('"logs"',)),
    "docker compose stop": (f"{STACK}::test_stop_during_a_job_loses_nothing_and_the_next_up_goes_on", ('.compose("stop")',)),
    "docker compose --profile cpu down": (f"{STACK}::test_down_leaves_nothing_but_the_files", ("stack.down()", '"down"')),
    "docker compose exec coordinator statetap": (
        f"{STACK}::test_a_dataset_reaches_complete_though_containers_are_killed_on_the_way",
        ('"exec", "-T", "coordinator", "statetap"',),
    ),
    "docker compose run --rm --no-deps -v ./keys:/made coordinator statetap keys add": (
        f"{STACK}::test_a_key_is_made_in_a_container_of_its_own",
        ('"run", "--rm", "--no-deps", "-v"', '"statetap", "keys", "add"'),
    ),
    "mkdir -p": (UP, ("self.store.mkdir()",)),
    "chown 10001:10001": (UP, ("os.chown(self.store, UID, UID)", "UID = 10001")),
    "cp .env.example .env": ("tests/containers/test_files.py::test_the_example_starts_the_gpu_stack", ('".env.example"',)),
    "cp -a": ("tests/unit/test_howto.py::test_a_copy_of_a_store_is_whole_and_shares_what_it_shared", ('begins("cp", "-a")',)),
    "redis-cli": (
        "tests/integration/test_external_redis.py::test_the_service_needs_no_right_that_the_page_does_not_grant",
        ('begins("redis-cli")',),
    ),
}
"""Beginning of a command -> the test that runs it, and what stands in that test's file, or in compose.py beside it."""

NOT_OURS = {"git pull", "docker inspect", "docker volume rm"}
"""Named in sentences; of other people."""
SGLANGS = {"--chunked-prefill-size", "--context-length", "--mem-fraction-static", "--revision"}
OTHERS = {"--wait", "--timeout"}  # docker compose, helm
MARK = re.compile(r"#.*\bneeds an? (GPU|cluster)\b")
VARIABLE = re.compile(r"\b(?:STATETAP|COMPOSE|HF|REDIS|SGLANG)_[A-Z0-9_]*[A-Z0-9]\b")


@dataclass(frozen=True, kw_only=True)
class Command:
    """``words`` without the assignments before them; ``needs``: GPU, cluster or nothing."""

    words: list[str]
    needs: str = ""
    given: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def begins(self, *words: str) -> bool:
        return self.words[: len(words)] == list(words)


def blocks(page: str, *languages: str) -> list[str]:
    """What stands in the fenced blocks of these languages."""
    return [text for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S) if language in languages]


def env_files(page: str) -> list[dict[str, str]]:
    """The blocks that show a .env, by name."""
    return [dict(line.split("=", 1) for line in text.splitlines()) for text in blocks(page, "ini")]


def spans(page: str) -> list[str]:
    """What stands in backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S))


def commands(page: str) -> Iterator[Command]:
    """Of the shell blocks. A mark behind a line is that line's, one on a line of its own holds to the end of the block."""
    for block in blocks(page, "bash", "console", "sh", "shell"):
        whole = ""
        for line in block.replace("\\\n", " ").splitlines():
            mark = MARK.search(line)
            if mark and line.lstrip().startswith("#"):
                whole = mark[1]
            yield from parts(line, mark[1] if mark else whole)


def parts(line: str, needs: str = "") -> Iterator[Command]:
    """The commands of a line, at ``;`` and ``&&``."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in (";", "&&"):
            words.append(word)
        elif words:
            given = {}
            while words and (found := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", words[0], re.S)):
                given[found[1]] = found[2]
                words = words[1:]
            yield Command(words=words, needs=needs, given=given)
            words = []


# what is wrong


def problems(page: str, path: Path = FOLDER / "page.md") -> list[str]:
    """One sentence a thing; ``path`` is where links begin."""
    found = [f"{command.text!r}: {what}" for command in commands(page) for what in _command(command)]
    found += [f"{span!r}: {what}" for span in spans(page) for what in _span(span)]
    found += [f"{name} is no variable of ours" for name in sorted(set(VARIABLE.findall(page)) - variables())]
    found += [f"{value} {unit} is not the figure {name}" for value, unit, name in quoted(page) if not _is_figure(name, value, unit)]
    found += [f"the link {target} leads nowhere" for target in re.findall(r"\]\(([^):]+)\)", page) if not _leads(path, target)]
    found += [f"the block of {list(block)}: {what}" for block in map(loaded, blocks(page, "yaml")) for what in _yaml(block)]
    return found


def _command(command: Command) -> Iterator[str]:
    words = command.words
    if not words:
        yield "assignments alone"
        return
    for word in words:
        if re.match(r"(k8s|docs|images|examples|tests)/", word) and not (ROOT / word).exists():
            yield f"there is no {word}"
    match words:
        case ["statetap", *arguments]:
            yield from parse(arguments)
            yield from _tried(arguments, command.needs)
        case ["docker", "compose", *_] if "statetap" in words:
            yield from parse(words[words.index("statetap") + 1 :])
            yield from _run(command)
        case ["curl", *_]:
            yield from _curl(words)
        case ["export", *given]:
            yield from (f"{g} is no assignment" for g in given if not re.match(r"[A-Z_]+=", g))
        case ["kubectl", *_] if command.needs != "cluster":
            yield "needs a cluster and does not say so"
        case _:
            yield from _run(command)


def _run(command: Command) -> Iterator[str]:
    if not command.needs and runs(command.text) is None:
        yield "no test runs it, and it does not say that it needs a GPU or a cluster"


def runs(text: str) -> tuple[str, tuple[str, ...]] | None:
    """The test that runs a command, and what to look for in it."""
    fits = [known for known in RUN_BY if text == known or text.startswith(f"{known} ")]
    return RUN_BY[max(fits, key=len)] if fits else None


def parse(arguments: list[str]) -> Iterator[str]:
    """By the real parser: the verb, its options, the types of their values, and what has to be given. Nothing is run."""
    name, rest = verb(arguments)
    if name is None:
        yield f"statetap has no such verb: {arguments[:2]}"
        return
    try:
        made = verbs()[name].make_context(name, rest)
        check_flags(made.params.get("sglang") or ())
    except typer.TyperException as e:
        yield e.format_message()
    except StatetapError as e:
        yield e.message


def _tried(arguments: list[str], needs: str) -> Iterator[str]:
    """What needs no GPU is given to the real command by a test: the verb, and each of its options."""
    name, rest = verb(arguments)
    if name is None or needs:
        return
    if name in ("statetap up", "statetap run") and "--cpu" not in rest:
        yield "needs a GPU and does not say so"
    for word in [*name.split()[1:], *(w.split("=")[0] for w in rest if w.startswith("--"))]:
        if f'"{word}"' not in _tests():
            yield f"no test gives {word} to the command line"


def verb(arguments: list[str]) -> tuple[str | None, list[str]]:
    known = verbs()
    for n in (2, 1):
        name = " ".join(["statetap", *arguments[:n]])
        if len(arguments) >= n and name in known:
            return name, arguments[n:]
    return None, []


def _curl(words: list[str]) -> Iterator[str]:
    (url,) = (w for w in words if w.startswith("http"))
    route = re.sub(r"^https?://[^/]+", "", url)
    method = "POST" if "-F" in words else "GET"
    if (method, route) not in routes():
        yield f"the API has no {method} {route}"


def _span(span: str) -> Iterator[str]:
    """Of a sentence: a verb may stand there without what it needs, but not with an option that it has not."""
    words = span.split()
    match words:
        case ["statetap", *rest]:
            name, _ = verb(rest)
            if name is None:
                yield "statetap has no such verb"
            elif wrong := [w for w in rest if w.startswith("-") and w.split("=")[0] not in options(name)]:
                yield f"{name} has no {wrong[0]}"
        case ["docker" | "kubectl" | "git" | "curl", _, *_] if runs(span) is None and span not in NOT_OURS and words[0] != "kubectl":
            yield "no test runs it"
        case [flag, *_] if flag.startswith("--") and flag.split("=")[0] not in _flags():
            yield "nothing here has this option"
    named, heads = _dotted()
    dotted = span.partition(":")[0]  # a value may stand behind it
    if re.fullmatch(r"[a-z][A-Za-z_]*(\.[a-zA-Z][A-Za-z0-9_-]*)+", dotted) and dotted.split(".")[0] in heads and dotted not in named:
        yield "neither a value of the chart nor a figure"


def _yaml(block: dict[str, Any]) -> Iterator[str]:
    """An override of docker-compose.yml (that Compose takes it, tests/containers/test_files.py looks), or values of the chart."""
    if "services" not in block:
        yield from (f"{path} is no value of the chart" for path in _paths(block) if path not in values())
        return
    compose = loaded((ROOT / "docker-compose.yml").read_text())
    for name, service in block["services"].items():
        if name not in compose["services"]:
            yield f"there is no service {name}"
        yield from (f"there is no network {n}" for n in service.get("networks", ()) if n not in compose["networks"])
        yield from (f"{n} is no variable of ours" for n in service.get("environment", ()) if n not in variables())


def loaded(text: str) -> dict[str, Any]:
    class Loader(yaml.SafeLoader):
        """Compose's own tags: what they say is not looked at."""

    for tag in ("!reset", "!override"):
        Loader.add_constructor(tag, lambda loader, node: loader.construct_mapping(node, deep=True))
    return dict(yaml.load(text, Loader))


def _paths(node: Any, path: str = "") -> Iterator[str]:
    """Of all values below, by dots; a map of free names is one value."""
    if not isinstance(node, dict) or path in values():
        yield path
        return
    for key, value in node.items():
        yield from _paths(value, f"{path}.{key}" if path else key)


def _leads(path: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    page = path.parent / name if name else path
    if not page.exists():
        return False
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in heads}


def quoted(page: str) -> list[tuple[str, str, str]]:
    """(number, unit, name) where a sentence gives a figure: 1.4 MiB (`soak.redis_mib`)."""
    return re.findall(r"([\d.,]*\d) (\w+) \(`([a-z_]+\.[a-z0-9_.-]+)`", page)


def _is_figure(name: str, value: str, unit: str) -> bool:
    return figures().get(name) == (float(value.replace(",", "")), unit)


# what there is


@cache
def variables() -> set[str]:
    """Environment variables that the reference, .env.example or docker-compose.yml name."""
    files = ("docs/reference/settings.md", "docs/reference/cli.md", ".env.example", "docker-compose.yml")
    return {name for f in files for name in VARIABLE.findall((ROOT / f).read_text())} | set(REFUSED_ENVIRONMENT)


@cache
def verbs() -> dict[str, Any]:
    """Name -> command, as the parser has it."""
    return dict(reference.commands())


@cache
def routes() -> set[tuple[str, str]]:
    return {(method.upper(), path) for method, path, _ in reference.operations(reference.document())}


@cache
def values() -> frozenset[str]:
    """Paths of the chart's values."""
    return frozenset(path for path, *_ in rows())


@cache
def figures() -> dict[str, tuple[float, str]]:
    return {f["name"]: (float(f["value"]), f["unit"]) for f in json.loads((ROOT / "docs" / "figures.json").read_text())}


@cache
def _dotted() -> tuple[set[str], set[str]]:
    """Names with dots that a page may use, and what such names begin with."""
    sections = {path[: m.start()] for path in values() for m in re.finditer(r"\.", path)}
    named = {*values(), *sections, *figures()}
    return named, {name.split(".")[0] for name in named}


@cache
def _tests() -> str:
    """The tests that call the command line."""
    files = [f for folder in ("unit", "integration", "e2e") for f in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    return "\n".join(f.read_text() for f in files if f.name != "test_howto.py")


@cache
def options(name: str) -> set[str]:
    """Options of a verb."""
    return {o for p in verbs()[name].params for o in (*p.opts, *p.secondary_opts)} | {"--", "--help"}


@cache
def _flags() -> set[str]:
    launcher = (ROOT / "services" / "statetap" / "engine" / "launcher.py").read_text()
    ours = {o for name in verbs() for o in options(name)} | set(re.findall(r'add_argument\("(--[a-z-]+)"', launcher))
    return ours | set(REFUSED) | set(OURS) | SGLANGS | OTHERS
