"""The worker's parts that need no process: totals, admission, settings, READY."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from statetap.contracts.errors import EngineError, ErrorCode
from statetap.contracts.records import RowRecord
from statetap.store.ledger import totals_of
from statetap.worker.admission import Admission
from statetap.worker.circuit import Circuit
from statetap.worker.context import make_context, read_ready, wait_for_ready
from statetap.worker.lease import make_lease_folder, remove_lease_folder
from statetap.worker.settings import WorkerSettings
from statetap.worker.tally import Tally
from tests.support.jobs import profile, ready


def test_the_tally_is_what_folding_the_ledger_gives() -> None:
    rng = random.Random(5)
    tally, best = Tally(7), {}
    for _ in range(500):
        state = rng.choice(["done", "failed", "skipped"])
        code = "" if state == "done" else rng.choice(["engine_timeout", "bad_row"])
        size = 100 if state == "done" else 0
        record = RowRecord(row=rng.randrange(40), state=state, generation=rng.randrange(3), tokens=9, bytes=size, code=code)
        tally.add(record)
        held = best.get(record.row)
        if held is None or record.rank > held.rank:
            best[record.row] = record
        assert tally.totals() == totals_of(7, best.values())


def test_admission_takes_all_or_nothing() -> None:
    a = Admission(window=2, rows=3, tap_share=100)
    assert a.admit(60) and not a.admit(60)  # bytes
    assert a.admit(40) and not a.admit(0)  # window
    a.answered()
    assert a.admit(0) and not a.admit(0)  # rows, and bytes are all taken
    a.answered()
    a.answered()
    assert not a.admit(0)
    a.ended(60)
    assert not a.admit(61) and a.admit(60)


def test_the_tap_is_shared_by_the_workers_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "READY.json").write_bytes(ready(profile()))
    found = read_ready(tmp_path)
    assert found is not None
    settings = WorkerSettings(tap=tmp_path, tap_bytes=1000, workers_per_engine=4)
    assert make_context(settings, found, "w").tap_share == 250
    assert make_context(WorkerSettings(tap=tmp_path), found, "w").tap_share > 0


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"profile": {}}', b'{"engine_id": "x"}'])
def test_a_ready_file_of_another_kind_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "READY.json").write_bytes(data)
    with pytest.raises(EngineError) as e:
        read_ready(tmp_path)
    assert e.value.code is ErrorCode.PROTOCOL_MISMATCH


def test_waiting_for_the_engine_ends_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no READY\.json") as e:
        wait_for_ready(WorkerSettings(tap=tmp_path, ready_timeout_s=0.01), threading.Event())
    assert e.value.code is ErrorCode.ENGINE_START_FAILED
    stop = threading.Event()
    stop.set()
    assert wait_for_ready(WorkerSettings(tap=tmp_path), stop) is None


def test_every_setting_is_described_and_the_redis_url_stays_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(field.description for field in WorkerSettings.model_fields.values())
    monkeypatch.setenv("STATETAP_REDIS_URL", "redis://:hunter2@host/0")
    settings = WorkerSettings()
    assert "hunter2" not in repr(settings) and "hunter2" not in json.dumps(settings.model_dump(mode="json"))
    monkeypatch.setenv("STATETAP_WINDOW", "0")
    with pytest.raises(ValidationError, match="window"):
        WorkerSettings()


def test_the_circuit_opens_on_a_run_of_one_cause_and_stays_open_for_its_batch() -> None:
    circuit = Circuit(3)
    for code in (ErrorCode.ZERO_STATES, ErrorCode.NONFINITE_STATES, ErrorCode.NONFINITE_STATES):
        assert not circuit.failed(code, "made")
    assert not circuit.stops(ErrorCode.NONFINITE_STATES, "made")
    assert circuit.failed(ErrorCode.NONFINITE_STATES, "made")
    circuit.good()  # was in flight
    assert circuit.is_open and circuit.failed(ErrorCode.ZERO_STATES, "another") and circuit.code == "nonfinite_states"
    assert circuit.stops(ErrorCode.NONFINITE_STATES, "made") and "3 rows in a row failed with nonfinite_states" in circuit.message
    following = Circuit(3, circuit.code, circuit.rows)
    following.good()
    assert not following.is_open and not Circuit(0, "zero_states", 99).is_open


def test_a_lease_folder_goes_although_the_engine_writes_into_it_meanwhile(tmp_path: Path) -> None:
    """Seen to fail with one rmtree: a file that came behind its listing left the folder, without the lease file by which it is found."""
    folder, stop = tmp_path / "0123456789abcdef", threading.Event()

    def engine() -> None:
        for i in itertools.count():
            if stop.is_set():
                return
            with contextlib.suppress(FileNotFoundError):
                (folder / f"{i}.tmp").write_bytes(b"")

    writer = threading.Thread(target=engine)
    writer.start()
    try:
        for _ in range(30):
            make_lease_folder(folder, b"{}")
            time.sleep(0.01)  # some files
            remove_lease_folder(folder)
            assert not folder.exists()
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EROFS, errno.EBUSY])
def test_a_lease_folder_that_cannot_be_removed_is_left_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Seen to fail with tries that go on whatever the error is: 5 s of a whole core."""
    make_lease_folder(folder := tmp_path / "0123456789abcdef", b"{}")
    tries: list[str] = []

    def refuse(path: str, **_: object) -> None:
        tries.append(path)
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "unlink", refuse)
    remove_lease_folder(folder)
    assert folder.exists() and len(tries) == 1
