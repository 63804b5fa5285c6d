"""docs/howto: each command is run by a test or says that it needs a GPU or a cluster, and what the pages name is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from statetap.cli import stack
from statetap.cli.doctor import redis_server
from statetap.cli.doctor.host import TESTED_SGLANG
from statetap.contracts import PROTOCOL, SCHEMA_VERSION
from statetap.contracts.boundaries import default_boundaries
from statetap.contracts.layout import sample
from statetap.contracts.sample_format import SampleFormat
from statetap.contracts.tensors import tap_bytes
from statetap.coordinator.connections import connect
from statetap.engine.flags import check_flags
from statetap.engine.launcher import parse_args
from statetap.engine.model import NOT_ADMITTED
from statetap.engine.plugin import check_ring
from statetap.store.verify import verify_job
from statetap.worker.settings import WorkerSettings
from tests.support.chart.generate import defaults
from tests.support.finished import FinishedJob
from tests.support.howto import FOLDER, PAGES, ROOT, RUN_BY, commands, env_files, loaded, parts, problems, runs, spans
from tests.support.jobs import profile

TEXTS = {p.name: p.read_text() for p in PAGES}


def of(name: str) -> str:
    return TEXTS[name]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options take their values from the environment too."""
    for name in [n for n in os.environ if n.startswith("STATETAP_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_a_page_has_no_problem(path: Path) -> None:
    assert problems(path.read_text(), path) == []


def test_the_pages_are_those_of_the_readme_and_have_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in PAGES if f"docs/howto/{p.name}" not in readme] == []
    every = [c for text in TEXTS.values() for c in commands(text)]
    assert len(every) > 30 and {c.needs for c in every} == {"", "GPU", "cluster"}
    assert len([c for c in every if not c.needs]) > 15
    assert sum(s.startswith(("statetap ", "docker compose ")) for text in TEXTS.values() for s in spans(text)) > 20


@pytest.mark.parametrize("command", RUN_BY)
def test_the_test_that_runs_a_command_is_there_and_runs_it(command: str) -> None:
    test, wanted = RUN_BY[command]
    file, _, name = test.partition("::")
    source = (ROOT / file).read_text()
    assert re.search(rf"^(async )?def {name}\(", source, re.M), test
    beside = ROOT / file.rpartition("/")[0] / "compose.py"
    looked = source + (beside.read_text() if beside.exists() else "")
    assert [w for w in wanted if w not in looked] == []
    used = [c.text for text in TEXTS.values() for c in commands(text)] + [s for text in TEXTS.values() for s in spans(text)]
    assert any(runs(text) is RUN_BY[command] for text in used), "no page has it any more"


BROKEN = {
    "```bash\nmake coffee\n```": "no test runs it",
    "```console\ndocker compose restart\n```": "no test runs it",
    "```bash\nmkdir -p x && reboot\n```": "no test runs it",
    "```bash\nstatetap submitt a.jsonl\n```": "no such verb",
    "```bash\nstatetap submit a.jsonl --shuffel 7\n```": "No such option",
    "```bash\nstatetap submit a.jsonl --retain-bytes 2XB\n```": "is not a size",
    "```bash\nstatetap submit\n```": "Missing",
    "```bash\nstatetap up --model m --store s\n```": "needs a GPU and does not say so",
    "```bash\nstatetap jobs --reason low_disk\n```": "no test gives --reason",
    "```bash\nstatetap up --model m --store s -- --pp-size 2   # needs a GPU\n```": "a pipeline stage sees only its own layers",
    "```bash\ndocker compose exec coordinator statetap watcch\n```": "no such verb",
    "```bash\nkubectl get pods\n```": "does not say so",
    "```bash\nhelm install st k8s/statetap\n```": "no test runs it",
    "```bash\n# needs a cluster\nhelm install st k8s/statetap -f k8s/examples/none.yaml\n```": "there is no k8s/examples/none.yaml",
    "```bash\ncurl -s http://127.0.0.1:8700/v1/engine\n```": "the API has no GET /v1/engine",
    "```bash\nSTATETAP_REDIS=redis://h statetap doctor\n```": "STATETAP_REDIS is no variable",
    "Set `STATETAP_TAPSIZE`.": "STATETAP_TAPSIZE is no variable",
    "Give `statetap gc --aply`.": "has no --aply",
    "Call `docker compose rm`.": "no test runs it",
    "Give `--retain-byte`.": "nothing here has this option",
    "Set `engine.tapp`.": "neither a value of the chart nor a figure",
    "It was 1.5 MiB (`soak.redis_mib`).": "is not the figure",
    "See [there](nowhere.md).": "leads nowhere",
    "See [there](cluster.md#nowhere).": "leads nowhere",
    "```yaml\nredis:\n  external: {prot: 6380}\n```": "redis.external.prot is no value",
    "```yaml\nservices:\n  reddis: {}\n```": "there is no service reddis",
    "```yaml\nservices:\n  worker: {networks: [front]}\n```": "there is no network front",
}


@pytest.mark.parametrize("added", BROKEN)
def test_a_broken_page_is_found(added: str) -> None:
    """Each of them at the end of a good page."""
    found = problems(f"{of('service.md')}\n{added}\n", FOLDER / "service.md")
    assert any(BROKEN[added] in f for f in found), found


def test_a_mark_holds_for_its_line_or_for_the_rest_of_its_block() -> None:
    page = "```bash\na\n# needs a cluster\nb\nc   # needs a GPU; slow\n```\n\n```bash\nd && X=1 e; f   # needs nothing\n```\n"
    assert [(c.text, c.needs) for c in commands(page)] == [
        ("a", ""), ("b", "cluster"), ("c", "GPU"), ("d", ""), ("e", ""), ("f", ""),
    ]  # fmt: skip
    (command,) = parts("A=b 'C=d' e=f '>x' -- -y")
    assert command.given == {"A": "b", "C": "d"} and command.words == ["e=f", ">x", "--", "-y"]


# external-redis.md


def test_the_pages_address_with_an_authority_of_ones_own_is_one_that_the_clients_take() -> None:
    (query,) = set(re.findall(r"rediss://…:6380/0(\?\S+)`", of("external-redis.md")))
    client = connect(f"rediss://statetap:p%40ss@redis.example.com:6380/0{query}", decode=True)
    given = client.connection_pool.connection_kwargs
    assert given["ssl_ca_certs"] == "/store/redis-ca.pem" and (given["username"], given["password"], given["port"]) == (
        "statetap",
        "p@ss",
        6380,
    )
    assert client.connection_pool.connection_class.__name__ == "SSLConnection"
    client.close()


def test_what_the_page_asks_of_a_redis_is_what_the_doctor_looks_for() -> None:
    page = of("external-redis.md")
    assert f"| {redis_server.OLDEST[0]}.{redis_server.OLDEST[1]} or later |" in page
    assert f"a round trip below {redis_server.SLOW_S * 1000:.0f} ms" in page


# big-models.md


def test_the_numbers_of_the_big_model_are_those_of_the_code() -> None:
    page, gib = of("big-models.md"), 1 << 30
    kimi = profile(hidden=7168, layers=61, boundaries=(2, 30, 58), vocab=163_840, max_length=32_768 - NOT_ADMITTED)
    assert kimi.boundaries == default_boundaries(61) and "L 61, H 7,168, boundaries 2, 30, 58" in page
    assert kimi.bytes_per_token == 57_344 and "= 57,344 bytes" in page
    raw, fp8 = (SampleFormat(kimi, encoding=e).bytes(10**8, 10**8, 12_207) / 1e12 for e in ("raw", "fp8"))
    assert f"{raw:.1f} TB; with `--encoding fp8` {fp8:.1f} TB" in page
    assert f"| {tap_bytes(kimi, 8192) / gib:.2f} GiB |" in page
    short, long = (round(32 * tap_bytes(kimi, n) / gib) for n in (8192, kimi.max_length))
    assert f"{short} GiB at 8,192 tokens a row, {long} GiB at {kimi.max_length:,}, the longest" in page
    example = yaml.safe_load((ROOT / "k8s" / "examples" / "kimi-k2.5-8gpu.yaml").read_text())
    assert (example["workers"]["window"], example["engine"]["tap"]) == (16, "64Gi") and "gives each worker 25.6 GiB" in page
    assert 64 * 0.8 / 2 == 25.6 and tap_bytes(kimi, kimi.max_length) < 25.6 * gib
    check_ring(16 * gib, 16_384, kimi.bytes_per_token)
    check_ring(4 * gib, 8192, kimi.bytes_per_token)


def test_what_the_page_calls_refused_is_refused_for_that_reason() -> None:
    table = of("big-models.md").partition("## What is refused")[2].partition("## ")[0]
    named = re.findall(r"^\| ([^|]*`--[^|]*) \| ([^|]*) \|", table, re.M)
    assert len(named) > 5
    for flags, _ in named:
        for flag in re.findall(r"`(--[a-z-]+)`", flags):
            with pytest.raises(Exception, match=flag):
                check_flags([flag, "2"])


def test_the_launcher_takes_what_the_env_file_of_the_page_gives() -> None:
    """As Compose fills in docker-compose.yml. Seen to fail with a flag of SGLang's before the ``--``."""
    (given,) = env_files(of("big-models.md"))

    def value(m: re.Match[str]) -> str:
        name, kind, other = m.groups()
        return (other if given.get(name) else "") if kind == ":+" else given.get(name) or (other if kind == ":-" else "")

    command = loaded((ROOT / "docker-compose.yml").read_text())["services"]["engine"]["command"]
    (made,) = parts(re.sub(r"\$\{([A-Z_]+)(:[-+?])([^}]*)\}", value, command))
    assert made.begins("python3", "-m", "statetap.engine")
    args, sglang = parse_args(made.words[3:])
    assert (args.model, args.tp, args.trust_remote_code, args.start_timeout) == ("/models/Kimi-K2.5", 8, True, 7200)
    assert sglang == ["--context-length", "32768", "--chunked-prefill-size", "16384"]
    check_flags(sglang)
    check_ring(int(given["STATETAP_ENGINE_RING_BYTES"]), 16_384, 57_344)
    example = yaml.safe_load((ROOT / "k8s" / "examples" / "kimi-k2.5-8gpu.yaml").read_text())
    pairs = {"TAP_SIZE": "tap", "SHM_SIZE": "shm"}
    assert all(given[f"STATETAP_{ours}"] == example["engine"][theirs].replace("Gi", "g") for ours, theirs in pairs.items())
    assert int(given["STATETAP_STOP_S"]) >= int(given["STATETAP_DRAIN_S"]) + 40


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_an_env_file_of_a_page_names_what_compose_reads(page: Path) -> None:
    """Seen to fail with a setting that only the service itself has."""
    example = set(re.findall(r"^#?([A-Z][A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.M))
    for given in env_files(page.read_text()):
        assert given.keys() <= example, given.keys() - example


# upgrades.md


def test_the_times_and_versions_of_the_page_are_those_of_the_code() -> None:
    page, compose = of("upgrades.md"), loaded((ROOT / "docker-compose.yml").read_text())["services"]
    assert (SCHEMA_VERSION, PROTOCOL) == (1, 1) and page.count("now 1)") == 2
    drain = WorkerSettings.model_fields["drain_s"].default
    assert f"`STATETAP_DRAIN_S` ({drain:.0f} s; {defaults()['workers']['drainSeconds']} s in the chart)" in page
    assert f"workers {stack.DRAIN_S:.0f} s, then the rest {stack.STOP_S:.0f} s" in page
    grace = {name: re.findall(r"\d+", str(compose[name]["stop_grace_period"]))[0] for name in ("worker", "engine", "coordinator")}
    assert f"workers {grace['worker']} s (`STATETAP_STOP_S`), engine {grace['engine']} s, coordinator {grace['coordinator']} s" in page
    assert f"{' and '.join(TESTED_SGLANG)} were tried" in page
    (image,) = re.findall(r"\(`(lmsysorg/\S+)`\)", page)
    assert f"FROM {image} AS gpu" in (ROOT / "images" / "engine" / "Dockerfile").read_text()


def test_a_copy_of_a_store_is_whole_and_shares_what_it_shared(tmp_path: Path) -> None:
    """The commands of the page, with other folders."""
    words = next(c for c in commands(of("upgrades.md")) if c.begins("cp", "-a")).words
    job = FinishedJob(tmp_path / "data" / "states")
    shared = job.path.parent / "other"
    shared.mkdir()
    os.link(job.file(0), shared / "data_0")
    (tmp_path / "backup").mkdir()
    subprocess.run([f"{tmp_path}{w}" if w.startswith("/") else w for w in words], check=True)
    copied = tmp_path / "backup" / "states" / job.path.relative_to(tmp_path / "data" / "states")
    report = verify_job(copied)
    assert report.ok and report.files == len(job.rows)
    assert (copied / sample(0)).stat().st_ino == (copied.parent / "other" / "data_0").stat().st_ino
