"""The store on file systems that do not keep the commit's promises: refused at the start, with the reason, before a row is lost to it.

exFAT by FUSE over a loop device is a real file system without hard links. Where that cannot be mounted, and for the promises that no file
system at hand breaks, the shim makes the errors.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from statetap.store.probe import PREFIX
from tests.faults.forms import FULL
from tests.faults.shim import Fault, Shim
from tests.support.cli import statetap
from tests.support.coordinator import Coordinator
from tests.support.redis import RedisServer
from tests.support.workers import Process, Rig, eventually


@pytest.fixture
def without_links(tmp_path: Path) -> Iterator[Path]:
    """A mounted exFAT."""
    if not all(map(shutil.which, ("mkfs.exfat", "mount.exfat-fuse", "losetup"))):
        pytest.skip("no exfat-fuse and exfatprogs")
    image, path = tmp_path / "exfat.img", tmp_path / "exfat"
    path.mkdir()
    with open(image, "wb") as f:
        f.truncate(32 << 20)
    subprocess.run(["mkfs.exfat", image], check=True, capture_output=True)
    loop = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True)
    if loop.returncode:
        pytest.skip("this test has to be allowed to make a loop device")
    device = loop.stdout.strip()
    try:
        if subprocess.run(["mount.exfat-fuse", device, path], capture_output=True).returncode:
            pytest.skip("this test has to be allowed to mount by FUSE")
        try:
            yield path
        finally:
            subprocess.run(["umount", path], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def coordinator(folder: Path, redis_url: str, store: Path, **env: str) -> Process:
    own = {"STATETAP_REDIS_URL": redis_url, "STATETAP_STORE": str(store), "STATETAP_PORT": "0", "STATETAP_PORT_FILE": str(folder / "port")}
    return Process("coordinator", ["-m", "statetap.coordinator"], {**own, **env}, folder)


def test_a_store_without_hard_links_is_refused_with_the_reason(without_links: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    """Seen to fail without the probe (coordinator and worker started, and the first job would have stood as circuit_open)."""
    refused = coordinator(tmp_path, redis_server.url, without_links / "store")
    assert refused.popen.wait(20) == 2
    assert "store_unavailable" in refused.log and "link()" in refused.log and "next: Use another file system" in refused.log
    with Rig(tmp_path / "rig", redis_server.url) as rig:
        rig.env["STATETAP_STORE"] = str(without_links / "store")
        rig.start_engine()
        worker = rig.start_worker()
        assert worker.popen.wait(20) == 1
        assert "code=store_unavailable" in worker.log and "link()" in worker.log and "Traceback" not in worker.log + refused.log
    doctor = statetap("doctor", "--cpu", "--store", without_links / "store")
    assert doctor.code == 1 and "FAIL store promises: link() works and refuses a name that is there" in doctor.out
    assert not list((without_links / "store").glob(f"{PREFIX}*"))


@pytest.mark.parametrize("nth", range(1, 9) if FULL else (4, 7))
def test_what_fails_in_the_probe_ends_the_start(redis_server: RedisServer, tmp_path: Path, nth: int) -> None:
    """EIO at one of the probe's calls. Seen to fail with a start that goes on although a promise is broken."""
    store = tmp_path / "store"
    store.mkdir()
    shim = Shim(tmp_path, store)
    shim.arm(Fault.IO, nth)
    refused = coordinator(tmp_path, redis_server.url, store, **shim.env)
    code = eventually("it ended or listens", lambda: refused.popen.poll() or (tmp_path / "port").exists())
    hit = shim.disarm()
    refused.kill()
    assert hit.partition(" ")[2].startswith(f"/{PREFIX}"), hit
    assert code == 2 and "store_unavailable" in refused.log and "Traceback" not in refused.log, hit


def test_a_full_disk_does_not_keep_the_coordinator_from_starting(redis_server: RedisServer, tmp_path: Path) -> None:
    """Seen to fail with a probe that took "no space" for a broken promise: nobody could have deleted anything."""
    shim = Shim(tmp_path, tmp_path / "store")
    api = Coordinator(tmp_path, redis_server.url, STORE=str(tmp_path / "store"))
    api._env |= shim.env
    api.store.mkdir()
    shim.arm(Fault.NO_SPACE, 1)
    try:
        api.start()
        assert f"/{PREFIX}" in shim.disarm() and "reason=no_space" in api.log.read_text()
        assert api.http.get("/healthz").status_code == 200
    finally:
        api.close()
