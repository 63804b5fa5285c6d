"""``docker compose --profile cpu up``: the images are built from the project's own Dockerfiles, and the real SGLang in its container captures.

In order: what is left of the stack when it is down is the last test's.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import httpx
import moto
import pytest

from statetap.cli.compare import compare_job
from statetap.coordinator.keyfile import read_keys
from statetap.store.reader import JobDataset
from statetap.store.verify import verify_job
from tests.containers.compose import UID, Stack
from tests.containers.private import run
from tests.support.figures import print_figure
from tests.support.stack import tokenized

pytestmark = pytest.mark.timeout(900)
COMMAND = "STATETAP_FIGURES=1 python -m pytest -s tests/containers"


def files_of(stack: Stack, path: str) -> Path:
    """A job's folder as this host sees it."""
    return stack.store / Path(path).relative_to("/store")


@pytest.fixture(scope="module")
def model(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the engine serves, for transformers on this host."""
    folder = tmp_path_factory.mktemp("model")
    (engine,) = stack.containers("engine-cpu")
    stack.docker("cp", f"{engine}:/models/tiny", str(folder))
    return folder / "tiny"


def test_everything_comes_up_healthy_and_closed(stack: Stack) -> None:
    """Seen to fail with ``read_only`` left out, with a published engine port, and with ``networks`` left out of redis."""
    assert stack.client.ready()
    examined = [json.loads(line) for line in stack.compose("exec", "-T", "coordinator", "statetap", "doctor", "--json").splitlines()]
    assert {"coordinator", "redis", "engine-0", "store promises"} <= {f["subject"] for f in examined}
    page = httpx.get(f"{stack.url}/", headers={"Accept": "text/html"})
    assert 'src="page/app.js"' in page.text and httpx.get(f"{stack.url}/page/app.js").is_success, "the wheel has the page's files"
    containers = stack.containers()
    assert len(containers) == 6, containers.keys()  # redis, coordinator, ingest, engine, two workers
    for name, c in containers.items():
        host, config = c["HostConfig"], c["Config"]
        assert c["State"]["Health"]["Status"] == "healthy", name
        assert config["User"] and not config["User"].startswith(("0", "root")), name
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"], name
        assert "no-new-privileges:true" in host["SecurityOpt"] and host["RestartPolicy"]["Name"] == "unless-stopped", name
        bound = [b["HostIp"] for ports in (host["PortBindings"] or {}).values() for b in ports]
        assert bound == (["127.0.0.1"] if "coordinator" in name else []), name
        assert host["Memory"] or "engine" in name, f"{name} has no limit"
    networks = {n: set(c["NetworkSettings"]["Networks"]) for n, c in containers.items()}
    backend = f"{stack.project}_backend"
    for name, joined in networks.items():
        alone = any(part in name for part in ("redis", "worker", "engine"))
        assert joined == {backend} if alone else backend in joined, name
    (network,) = json.loads(stack.docker("network", "inspect", backend))
    assert network["Internal"]
    # One tmpfs, which engine and workers share and nobody else sees.
    taps = {n for n, c in containers.items() if any(m["Destination"] == "/tap" for m in c["Mounts"])}
    assert len(taps) == 3 and all("engine" in n or "worker" in n for n in taps)
    assert "tmpfs" in stack.compose("exec", "-T", "engine-cpu", "stat", "-f", "-c", "%T", "/tap")
    if os.environ.get("STATETAP_FIGURES"):
        print_figure("containers.up_s", stack.seconds["up"], "s", COMMAND, "docker compose --profile cpu up --wait, images built")
        print_figure("containers.build_s", stack.seconds["build"], "s", COMMAND, "both images, nothing cached, stand-in bases")
        for image in ("control", "engine-cpu"):
            size = stack.image_mib(f"statetap/{image}")
            print_figure(
                f"containers.image_mib.{image}", round(size), "MiB", COMMAND, "uncompressed, on a stand-in of python:3.11-slim-bookworm"
            )


def test_a_dataset_reaches_complete_though_containers_are_killed_on_the_way(stack: Stack, model: Path, tmp_path: Path) -> None:
    """Seen to fail with ``restart: no`` for the workers."""
    ids = tokenized(tmp_path / "rows.jsonl", 1500, 60, seed=51)
    job = stack.client.submit_job(stack.upload(tmp_path / "rows.jsonl")).job_id
    stack.rows_done(job, 30)
    stack.crash("worker-cpu")
    stack.rows_done(job, 200)
    stack.crash("coordinator")
    stack.rows_done(job, 400)
    stack.crash("engine-cpu")
    end = stack.ended(job)
    assert (end.state, end.rows.done, end.rows.total) == ("completed", 1500, 1500), end
    path = files_of(stack, end.path)
    report = verify_job(path, stack.store / "datasets" / end.dataset_id / "rows.arrow")
    assert report.ok and (report.files, report.extra) == (1500, 0), report
    items = JobDataset(path)
    assert [items[i]["input_ids"].tolist() for i in (0, 700, 1499)] == [ids[i] for i in (0, 700, 1499)]
    assert compare_job(path, str(model), samples=4).ok
    inside = stack.compose("exec", "-T", "coordinator", "statetap", "verify", end.path, "--json")
    assert json.loads(inside)["ok"]


def test_stop_during_a_job_loses_nothing_and_the_next_up_goes_on(stack: Stack, tmp_path: Path) -> None:
    """Workers drain: what was in flight is committed or open again, and nothing partial is left. Redis comes back from its append-only file.

    Seen to fail without the volume of the store.
    """
    tokenized(tmp_path / "rows.jsonl", 1200, 60, seed=52)
    job = stack.client.submit_job(stack.upload(tmp_path / "rows.jsonl")).job_id
    before = stack.rows_done(job, 60)
    assert before.state not in ("completed", "failed")
    stack.compose("stop")
    assert not stack.containers()
    files = files_of(stack, before.path)
    kept = {p.name: p.stat().st_ino for p in files.rglob("data_*")}
    assert len(kept) >= 60 and not list(files.rglob(".tmp-*"))
    stack.timed("again", "up", "--wait", "--wait-timeout", "300")
    end = stack.ended(job)
    assert (end.state, end.rows.done) == ("completed", 1200), end
    assert kept.items() <= {p.name: p.stat().st_ino for p in files.rglob("data_*")}.items()  # not one was written again
    assert verify_job(files, stack.store / "datasets" / end.dataset_id / "rows.arrow").ok


def test_a_key_is_made_in_a_container_of_its_own(stack: Stack, tmp_path: Path) -> None:
    """As docs/howto/gpu-host.md has it, with this folder in place of ./keys."""
    (tmp_path / "keys").mkdir()
    os.chown(tmp_path / "keys", UID, UID)
    volume = f"{tmp_path / 'keys'}:/made"  # its own /keys is read-only
    command = ["statetap", "keys", "add", "alice", "--scope", "write", "--file", "/made/keys.txt"]
    key = stack.compose("run", "--rm", "--no-deps", "-v", volume, "coordinator", *command).strip()
    (found,) = read_keys(tmp_path / "keys" / "keys.txt")
    assert key.startswith("st_") and found.name == "alice" and found.digest == hashlib.sha256(key.encode()).hexdigest()


S3 = """
services:
  s3:
    image: statetap/control:${{STATETAP_VERSION}}
    command: [python3, -c, "from moto.server import main; main(['-H', '0.0.0.0', '-p', '9000'])"]
    environment: {{PYTHONPATH: /moto}}
    volumes: ["{packages}:/moto:ro"]
    networks: [backend]
"""
MAKE_BUCKET = """
import time, boto3
for left in range(60):
    try:
        boto3.client("s3", endpoint_url="http://127.0.0.1:9000").create_bucket(Bucket="drafts")
        break
    except Exception:
        assert left < 59
        time.sleep(0.5)
"""


def test_with_the_second_file_samples_go_to_a_bucket(stack: Stack, tmp_path: Path) -> None:
    """The S3 server is this environment's own (moto), in a container of the internal network. The tap has another size now, too.

    Seen to fail with a volume for the tap that has one name whatever its size: Compose kept the former.
    """
    former = [v for v in stack.docker("volume", "ls", "-q").split() if v.startswith(f"{stack.project}_tap")]
    tokenized(tmp_path / "rows.jsonl", 100, 60, seed=53)
    dataset = stack.upload(tmp_path / "rows.jsonl")
    override = tmp_path / "s3.yml"
    override.write_text(S3.format(packages=Path(moto.__file__).parents[1]))
    keys = {"AWS_ACCESS_KEY_ID": "statetap", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_ENDPOINT_URL_S3": "http://s3:9000"}
    with stack.env_file.open("a") as f:
        f.writelines(f"{k}={v}\n" for k, v in ({"STATETAP_SAMPLES": "s3://drafts/train", "STATETAP_TAP_SIZE": "640m"} | keys).items())
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.s3.yml", "-f", str(override))
    stack.compose(*files, "up", "--detach", "s3")
    stack.compose(*files, "exec", "-T", *(x for k, v in keys.items() for x in ("-e", f"{k}={v}")), "s3", "python3", "-c", MAKE_BUCKET)
    stack.compose(*files, "up", "--wait", "--wait-timeout", "300")
    for service in ("engine-cpu", "worker-cpu"):
        size = stack.compose(*files, "exec", "-T", service, "stat", "-f", "-c", "%S %b", "/tap").split()
        assert int(size[0]) * int(size[1]) == 640 << 20, service
    stack.docker("volume", "rm", *former)  # nobody uses it
    end = stack.ended(stack.client.submit_job(dataset).job_id)
    assert (end.state, end.rows.done, end.samples) == ("completed", 100, f"s3://drafts/train/{end.job_id}"), end
    assert not list(files_of(stack, end.path).glob("rows_*"))
    inside = json.loads(stack.compose("exec", "-T", "coordinator", "statetap", "verify", end.path, "--json"))
    assert inside["ok"] and inside["files"] == 100


def test_down_leaves_nothing_but_the_files(stack: Stack) -> None:
    assert stack.left()
    stack.down()
    assert not stack.left() and list(stack.store.glob("jobs/*/COMPLETE"))
    assert not run(["docker", "images", "-q", "--filter", f"reference=statetap/*:{stack.project}"], env=stack.environment)
