"""A real S3 service: Ceph's gateway (radosgw) over a cluster of one monitor and one OSD, as processes on loopback in one folder.

No systemd, no mounts, no keys of its own: the daemons run in the foreground under our user, and are ended by their ids. The OSD is
BlueStore on a sparse file, so what it answers is on the disk. ``python -m tests.support.ceph`` says what is missing to run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.support.redis import free_port
from tests.support.workers import eventually

PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "rados", "monmaptool")
INSTALL = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"  # 16.2.15 on Debian 12
USER, DATA_POOL = "statetap", "default.rgw.buckets.data"
BLOCK_BYTES = 20 << 30  # sparse: what is put takes space, and no more

CONF = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
public addr = 127.0.0.1
# One process talks to one other on loopback. radosgw asks for an encrypted monitor by default, which there is not without keys.
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
# A path of a socket has 108 characters, and the folders of tests have long names.
admin socket =
pid file =
run dir = {folder}
crash dir = {folder}
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {block}
osd memory target = 1073741824
# One OSD: one copy.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
# The disk is the host's, and rarely empty.
mon data avail warn = 1
mon data avail crit = 1
# Pools are made one after another, a round of the monitor each.
paxos propose interval = 0.05
"""


def missing() -> str:
    """A sentence for a person where a program is not there, else nothing."""
    absent = [p for p in PROGRAMS if shutil.which(p) is None]
    return f"{', '.join(absent)}: not on the PATH; the real S3 service needs (as root): {INSTALL}" if absent else ""


def version() -> str:
    """``16.2.15``."""
    return subprocess.run(["radosgw", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]


class Ceph:
    """``endpoint`` of the gateway. Use as a context manager; ``folder`` is the caller's to remove."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.access_key, self.secret_key = "statetap", "not-a-secret"
        self._port = free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self._conf = folder / "ceph.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # the cluster

    def __enter__(self) -> Ceph:
        fsid, osd, mon_port = str(uuid.uuid4()), str(uuid.uuid4()), free_port()
        for name in ("mon", "osd"):
            (self.folder / name).mkdir()
        self._conf.write_text(CONF.format(fsid=fsid, mon_port=mon_port, folder=self.folder, block=BLOCK_BYTES))
        try:
            monmap = self.folder / "monmap"
            self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", str(monmap))
            self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(monmap))
            self._start("mon", "ceph-mon", "-i", "a")
            self.ceph("osd", "new", osd)
            self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
            self._start("osd", "ceph-osd", "-i", "0")
            eventually("the OSD is up", lambda: json.loads(self.ceph("osd", "stat", "-f", "json"))["num_up_osds"] == 1, 60)
            keys = (f"--access-key={self.access_key}", f"--secret-key={self.secret_key}")
            self.admin("user", "create", f"--uid={USER}", f"--display-name={USER}", *keys)
            self.start_gateway()
            self.client().put_object(Bucket=self.bucket(), Key="first")  # makes the pools
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("gateway", "osd", "mon"):  # SIGKILL: nothing of it is to stay
            self._kill(name)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            arguments = [command[0], "-c", str(self._conf), "-f", *command[1:]]
            self._daemons[name] = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def _kill(self, name: str) -> None:
        if daemon := self._daemons.pop(name, None):
            daemon.kill()
            daemon.wait()

    def _run(self, program: str, *arguments: str) -> str:
        conf = [] if program == "monmaptool" else ["-c", str(self._conf)]
        done = subprocess.run([program, *conf, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stderr[-2000:]}{self._ended()}"
        return done.stdout

    def _ended(self) -> str:
        """The last words of a daemon that is no more."""
        dead = [n for n, d in self._daemons.items() if d.poll() is not None]
        return "".join(f"\n{n} has ended: {(self.folder / f'{n}.out').read_text()[-2000:]}" for n in dead)

    def ceph(self, *arguments: str) -> str:
        """Of the cluster's own command line."""
        return self._run("ceph", "--connect-timeout", "30", *arguments)

    def admin(self, *arguments: str) -> str:
        """Of radosgw-admin."""
        return self._run("radosgw-admin", *arguments)

    # the gateway

    def start_gateway(self) -> None:
        """On the same port each time."""
        self._start("gateway", "radosgw", "-n", "client.rgw.a", f"--rgw-frontends=beast endpoint=127.0.0.1:{self._port}")
        eventually("the gateway answers", self._answers, 60)

    def kill_gateway(self) -> None:
        """SIGKILL, and wait."""
        self._kill("gateway")

    def _answers(self) -> bool:
        assert not (said := self._ended()), said
        with contextlib.suppress(OSError), urllib.request.urlopen(self.endpoint, timeout=2):
            return True
        return False

    # what a test uses

    @property
    def env(self) -> dict[str, str]:
        """For processes that use the bucket."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, **options: Any) -> Any:
        """Of boto3, as it comes."""
        keys = {"aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, config=Config(s3={"addressing_style": "path"}, **options), **keys)

    def bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"drafts-{uuid.uuid4().hex[:12]}"
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()
        return name

    def keys(self, bucket: str) -> dict[str, int]:
        """Key -> bytes."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", [])}

    def quota(self, bucket: str, max_bytes: int) -> None:
        """0: none."""
        if max_bytes:
            self.admin("quota", "set", "--quota-scope=bucket", f"--bucket={bucket}", f"--max-size={max_bytes}B")
        self.admin("quota", "enable" if max_bytes else "disable", "--quota-scope=bucket", f"--bucket={bucket}")

    def stored(self) -> Sequence[str]:
        """Names of what lies in the cluster for objects, those without a name of their own too."""
        return self._run("rados", "-p", DATA_POOL, "ls").split("\n")[:-1]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    """One for all tests: it takes some seconds to come up."""
    if said := missing():
        pytest.skip(said)
    folder = tmp_path_factory.mktemp("ceph")
    try:
        with Ceph(folder) as made:
            yield made
    finally:
        shutil.rmtree(folder / "osd", ignore_errors=True)  # gigabytes; the logs may stay


@pytest.fixture
def ceph(cluster: Ceph, monkeypatch: pytest.MonkeyPatch) -> Ceph:
    """Its variables are set in this process too, and in those that it starts."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    return cluster


if __name__ == "__main__":
    sys.exit(missing() or 0)
