"""The project's own docker-compose.yml, profile cpu, as a user runs it: built, up, spoken to from the host, and taken down."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from statetap import Client
from statetap.client import Job
from statetap.contracts.errors import StatetapError
from tests.containers.private import run
from tests.support.redis import free_port

ROOT = Path(__file__).parents[2]
UID = 10001
ENDED = ("completed", "completed_with_errors", "failed", "cancelled")


class Stack:
    """Use as a context manager: it is up and healthy inside. ``seconds`` says what building and coming up took."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.project = f"statetap-test-{secrets.token_hex(4)}"
        self.store = folder / "store"
        self.store.mkdir()
        os.chown(self.store, UID, UID)
        folder.chmod(0o755)
        for parent in folder.parents[:2]:  # pytest's own folders are for root alone
            parent.chmod(0o755)
        self.port = free_port()
        values = {
            "STATETAP_MODEL": "not-used-by-this-profile",
            "STATETAP_STORE": self.store,
            "STATETAP_PORT": self.port,
            "STATETAP_VERSION": self.project,
            "STATETAP_TAP_SIZE": "512m",
            "STATETAP_WORKERS": 2,
        }
        self.env_file = folder / "env"
        self.env_file.write_text("".join(f"{k}={v}\n" for k, v in values.items()))
        self._base = ["docker", "compose", "--env-file", str(self.env_file), "--project-name", self.project, "--profile", "cpu"]
        self.environment = environment
        self.seconds: dict[str, float] = {}
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.url)

    def __enter__(self) -> Stack:
        try:
            self.timed("build", "build", "coordinator", "engine-cpu")
            self.timed("up", "up", "--wait", "--wait-timeout", "300")
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.down()

    def compose(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """Stdout; raises AssertionError with what was said, and with the services' last lines."""
        try:
            return run([*self._base, *arguments], env=self.environment, cwd=ROOT, timeout_s=timeout_s)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.logs()}") from None

    def timed(self, name: str, *arguments: str) -> None:
        started = time.monotonic()
        self.compose(*arguments)
        self.seconds[name] = round(time.monotonic() - started, 1)

    def docker(self, *arguments: str) -> str:
        return run(["docker", *arguments], env=self.environment)

    def logs(self) -> str:
        done = subprocess.run(
            [*self._base, "logs", "--no-color", "--tail", "40"], env=self.environment, cwd=ROOT, capture_output=True, text=True
        )
        return (done.stdout + done.stderr)[-12_000:]

    def containers(self, *services: str) -> dict[str, dict[str, Any]]:
        """Name -> what ``docker inspect`` says, of running containers."""
        ids = self.compose("ps", "-q", *services).split()
        return {c["Name"].lstrip("/"): c for c in json.loads(self.docker("inspect", *ids))} if ids else {}

    def crash(self, service: str) -> None:
        """SIGKILL of its containers' first processes, as root of this host: the restart policy has to bring them back. Docker takes a
        ``docker kill`` for a stop; elsewhere than on root's own engine that is what there is, and they are started again."""
        pids = [c["State"]["Pid"] for c in self.containers(service).values()]
        assert pids, f"no container of {service} runs"
        if os.geteuid() == 0 and all(Path(f"/proc/{p}").exists() for p in pids):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            self.compose("kill", "--signal", "KILL", service)
            self.compose("up", "--detach", "--no-recreate", "--no-deps", service)

    def image_mib(self, name: str) -> float:
        (image,) = json.loads(self.docker("image", "inspect", f"{name}:{self.project}"))
        return float(image["Size"]) / (1 << 20)

    # the API

    def upload(self, path: Path) -> str:
        """Dataset id, once it is ready."""
        return self.client.wait_for_dataset(self.client.upload(path).dataset_id, timeout_s=120).dataset_id

    def rows_done(self, job_id: str, rows: int) -> Job:
        return self.until(lambda: self.client.job(job_id), lambda j: j.rows.done >= rows or j.state in ENDED, f"{rows} rows are done", 180)

    def ended(self, job_id: str) -> Job:
        return self.until(lambda: self.client.job(job_id), lambda j: j.state in ENDED, "the job has ended", 300)

    def until(self, look: Any, good: Any, what: str, seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if good(seen := look()):
                    return seen
            except StatetapError as e:  # the coordinator's container may be away for a moment
                seen = e
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}; last seen: {seen}\n{self.logs()}"
            time.sleep(0.2)  # between two looks

    def left(self) -> list[str]:
        """What there is of the project: containers, volumes, networks."""
        label = ["--filter", f"label=com.docker.compose.project={self.project}", "-q"]
        return [x for kind in (["ps", "-a"], ["volume", "ls"], ["network", "ls"]) for x in self.docker(*kind, *label).split()]

    def down(self) -> None:
        """Everything goes, the images that were built included. Idempotent."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "30")
        for image in self.docker("images", "-q", "--filter", f"reference=statetap/*:{self.project}").split():
            subprocess.run(["docker", "rmi", "-f", image], env=self.environment, capture_output=True)
