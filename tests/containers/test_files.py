"""The files of the stack by themselves: linted, complete, and clear about what is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.howto import FOLDER, blocks

ROOT = Path(__file__).parents[2]
COMPOSE = "".join((ROOT / name).read_text() for name in ("docker-compose.yml", "docker-compose.s3.yml"))
EXAMPLE = (ROOT / ".env.example").read_text()
DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))


def config(environment: dict[str, str], *arguments: str, env_file: Path | None = None) -> subprocess.CompletedProcess[str]:
    env_file = env_file or Path(os.devnull)
    command = ["docker", "compose", "--env-file", str(env_file), *arguments]
    kept = {k: v for k, v in environment.items() if not k.startswith(("STATETAP_", "COMPOSE_PROFILES"))}
    return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)


def filled(environment: dict[str, str], env_file: Path, *files: str) -> dict[str, dict[str, Any]]:
    """Services by name, as Compose reads them."""
    done = config(environment, *files, "config", "--format", "json", env_file=env_file)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["services"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.parent.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    """Seen to fail with a pip install without a pinned version."""
    done = subprocess.run([str(Path(sys.executable).parent / "hadolint"), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda p: p.parent.name)
def test_bases_are_pinned_and_images_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)(?: AS (\S+))?", text, re.M)
    stages = {name for _, name in bases}
    for base, _ in bases:
        assert base in stages or re.search(r":v?\d+\.\d+\.\d+", base), base
    finals = len(re.findall(r"^USER 10001:10001$", text, re.M))
    assert (
        finals == len(re.findall("org.opencontainers.image.title", text)) == len(re.findall("org.opencontainers.image.revision", text)) >= 1
    )


def test_each_variable_is_in_the_example_and_no_other() -> None:
    used = set(re.findall(r"\$\{([A-Z0-9_]+)[:}]", COMPOSE)) - {"COMPOSE_PROJECT_NAME"}  # Compose gives it
    named = set(re.findall(r"^#?([A-Z][A-Z0-9_]+)=", EXAMPLE, re.M))
    assert named - {"COMPOSE_PROFILES"} <= used, named - used
    assert used - named == set(), used - named
    defaults = dict(re.findall(r"\$\{([A-Z0-9_]+):-([^}]*)\}", COMPOSE)) | {"STATETAP_SAMPLES": "s3://bucket/prefix"}  # required there
    defaults |= dict.fromkeys(re.findall(r"\$\{([A-Z0-9_]+):\+", COMPOSE), "")  # a switch
    for name, value in re.findall(r"^#([A-Z0-9_]+)=(.*)$", EXAMPLE, re.M):
        assert defaults[name] == value, name


@pytest.mark.parametrize("profile", ["gpu", "cpu", "gpu,monitoring"])
def test_every_profile_is_valid(docker_environment: dict[str, str], profile: str) -> None:
    services = config(
        docker_environment,
        *(x for p in profile.split(",") for x in ("--profile", p)),
        "config",
        "--services",
        env_file=ROOT / ".env.example",
    )
    assert services.returncode == 0, services.stderr
    found = set(services.stdout.split())
    assert {"redis", "coordinator", "ingest"} <= found
    assert (
        ("engine" in found) == ("gpu" in profile)
        and ("engine-cpu" in found) == (profile == "cpu")
        and ("grafana" in found) == ("monitoring" in profile)
    )


def test_the_example_starts_the_gpu_stack(docker_environment: dict[str, str]) -> None:
    services = config(docker_environment, "config", "--services", env_file=ROOT / ".env.example")
    assert services.returncode == 0 and {"engine", "worker"} <= set(services.stdout.split()), services.stderr


def test_compose_takes_the_override_for_another_redis(docker_environment: dict[str, str], tmp_path: Path) -> None:
    """Seen to fail with ``depends_on`` of the external Redis left out (``redis`` is of a profile that is off), and without its ``networks``."""
    (text,) = (b for b in blocks((FOLDER / "external-redis.md").read_text(), "yaml") if "services:" in b)
    (tmp_path / "override.yml").write_text(text)
    files = ("-f", str(ROOT / "docker-compose.yml"), "-f", str(tmp_path / "override.yml"))
    services = filled(docker_environment, ROOT / ".env.example", *files)
    assert {"coordinator", "ingest", "engine", "worker"} <= services.keys()
    assert "redis" not in services and not any("redis" in s.get("depends_on", {}) for s in services.values())
    reach = {n for n, s in services.items() if {"egress", "public"} & set(s["networks"])}
    assert {"coordinator", "ingest", "worker"} <= reach, "who speaks to Redis gets out"
    assert services["worker"]["depends_on"].keys() == {"engine"}


def test_the_env_file_for_a_big_model_reaches_all_whom_it_concerns(docker_environment: dict[str, str], tmp_path: Path) -> None:
    """Seen to fail with the worker's ``STATETAP_READY_TIMEOUT_S`` left out of docker-compose.yml."""
    (text,) = blocks((FOLDER / "big-models.md").read_text(), "ini")
    (tmp_path / "env").write_text(text)
    services = filled(docker_environment, tmp_path / "env")
    engine, worker, coordinator = (services[n] for n in ("engine", "worker", "coordinator"))
    command = engine["command"]
    assert command[command.index("--start-timeout") + 1] == "7200" and command.index("--trust-remote-code") < command.index("--")
    assert command[command.index("--") + 1 :] == ["--context-length", "32768", "--chunked-prefill-size", "16384"]
    assert engine["healthcheck"]["start_period"] == "2h0m0s" and engine["environment"]["STATETAP_ENGINE_RING_BYTES"] == str(16 << 30)
    (gpus,) = engine["deploy"]["resources"]["reservations"]["devices"]
    assert int(gpus["count"]) == 8
    told = {"READY_TIMEOUT_S": "7200", "REQUEST_TIMEOUT_S": "900", "DRAIN_S": "120", "WINDOW": "16", "WRITE_THREADS": "4"}
    assert {k: worker["environment"][f"STATETAP_{k}"] for k in told} == told and worker["stop_grace_period"] == "3m0s"
    assert coordinator["environment"]["STATETAP_ALLOW_REMOTE_CODE"] == "1"
    usual = filled(docker_environment, ROOT / ".env.example")["engine"]["command"]
    assert "--trust-remote-code" not in usual and usual[-1] == "--"


def test_a_missing_model_stops_with_a_sentence(docker_environment: dict[str, str]) -> None:
    done = config(docker_environment, "config")
    assert done.returncode != 0 and "cp .env.example .env" in done.stderr and "STATETAP_MODEL" in done.stderr


def test_a_bucket_is_for_coordinator_and_workers_who_may_leave_the_internal_network(
    docker_environment: dict[str, str], tmp_path: Path
) -> None:
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.s3.yml", "--profile", "cpu")
    (tmp_path / "env").write_text("STATETAP_MODEL=m\nAWS_ACCESS_KEY_ID=key\n")
    missing = config(docker_environment, *files, "config", env_file=tmp_path / "env")
    assert missing.returncode != 0 and "name the bucket" in missing.stderr
    with (tmp_path / "env").open("a") as f:
        f.write("STATETAP_SAMPLES=s3://drafts/train\n")
    done = config(docker_environment, *files, "config", "--format", "json", env_file=tmp_path / "env")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    assert services["coordinator"]["environment"]["STATETAP_SAMPLES"] == "s3://drafts/train"
    assert {n for n, s in services.items() if (s.get("environment") or {}).get("AWS_ACCESS_KEY_ID") == "key"} == {
        "coordinator",
        "worker-cpu",
    }
    assert (
        set(services["worker-cpu"]["networks"]) == {"backend", "egress"} and services["worker-cpu"]["environment"]["STATETAP_TAP"] == "/tap"
    )
