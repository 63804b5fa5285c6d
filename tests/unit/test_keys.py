"""The keys file and `statetap keys`; sessions and the count of wrong keys."""

from __future__ import annotations

import hashlib
import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from statetap.cli.keys import keys_app
from statetap.contracts.errors import RequestError, StoreError
from statetap.coordinator import auth, sessions
from statetap.coordinator.auth import WrongKeys, host_name, is_loopback, scope_of
from statetap.coordinator.keyfile import Key, KeyFile, Scope, add_key, find, parse, read_keys, revoke_key
from statetap.coordinator.sessions import SECRET, Sessions


def invoke(*args: str, ok: bool = True):
    result = CliRunner().invoke(keys_app, args)
    assert (result.exit_code == 0) == ok, result.output
    return result


def test_a_key_is_printed_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "new" / "keys"
    key = invoke("add", "alice", "--scope", "admin", "--file", str(file)).stdout.strip()
    assert key.startswith("st_") and len(key) == 46
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() == f"alice admin {hashlib.sha256(key.encode()).hexdigest()}\n"
    added = json.loads(invoke("add", "bob", "--json", "--file", str(file)).stdout)
    assert (added["name"], added["scope"]) == ("bob", "write") and added["key"] != key
    listed = invoke("list", "--json", "--file", str(file)).stdout
    assert [json.loads(line) for line in listed.splitlines()] == [{"name": "alice", "scope": "admin"}, {"name": "bob", "scope": "write"}]
    assert key not in listed
    invoke("revoke", "alice", "--file", str(file))
    assert [k.name for k in read_keys(file)] == ["bob"]
    for args in (("add", "bob"), ("revoke", "alice"), ("add", "a b"), ("add", "-"), ("add", "")):
        assert isinstance(invoke(*args, "--file", str(file), ok=False).exception, (RequestError, SystemExit)), args
    assert [k.name for k in read_keys(file)] == ["bob"]
    assert [p.name for p in file.parent.iterdir()] == ["keys"], "no temp file stays"


def test_comments_mode_and_a_link_to_the_file_are_kept(tmp_path: Path) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    file.write_text("# of the team\n\nold read " + "0" * 64)
    file.chmod(0o640)
    link.symlink_to(file)
    add_key(link, "new", Scope.WRITE)
    assert link.is_symlink() and stat.S_IMODE(file.stat().st_mode) == 0o640
    revoke_key(link, "old")
    lines = file.read_text().splitlines()
    assert lines[:2] == ["# of the team", ""] and lines[2].startswith("new write ") and len(lines) == 3


def test_many_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: add_key(file, f"k{n}", Scope.READ), range(24)))
    keys = tuple(read_keys(file))
    assert {k.name for k in keys} == {f"k{n}" for n in range(24)}
    assert [find(keys, key).name for key in made] == [f"k{n}" for n in range(24)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("alice write", "2 words"),
        ("a/b read " + "0" * 64, "name"),
        ("alice all " + "0" * 64, "scope"),
        ("alice read " + "0" * 63, "SHA-256"),
        ("alice read " + "G" * 64, "SHA-256"),
        ("alice read st_" + "x" * 43, "revoke that key"),
        ("first read " + "0" * 64, "twice"),
    ],
)
def test_a_wrong_line_is_named_and_not_repeated(tmp_path: Path, line: str, fault: str) -> None:
    text = f"first read {'1' * 64}\n# x\n{line}\n"
    keys, (wrong,) = parse(text)
    assert [k.name for k in keys] == ["first"]
    assert wrong.startswith("line 3: ") and fault in wrong and line.split()[-1] not in wrong
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RequestError, match="line 3"):
        KeyFile(tmp_path / "keys")
    with pytest.raises(RequestError, match="line 3"):
        add_key(tmp_path / "keys", "new", Scope.READ)


def test_no_text_is_a_key_by_accident() -> None:
    keys = (Key(name="a", scope=Scope.READ, digest=hashlib.sha256(b"st_right").hexdigest()),)
    assert find(keys, "st_right") is keys[0]
    for text in ("", "st_", "st_righ", "st_right ", "ST_RIGHT", keys[0].digest, "\ud800", "é" * 5):
        assert find(keys, text) is None
    assert find((), "") is None


def test_a_session_ends_with_its_time_its_key_and_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = Key(name="alice", scope=Scope.READ, digest="1" * 64)
    held = Sessions.of_store(tmp_path, 100)
    token, ends = held.issue(alice)
    assert held.check(token, (alice,)) == (alice, ends)
    assert Sessions.of_store(tmp_path, 5).check(token, (alice,)) is not None, "another coordinator of the store knows it"
    promoted = Key(name="alice", scope=Scope.ADMIN, digest="1" * 64)
    assert held.check(token, (promoted,))[0].scope is Scope.ADMIN
    renewed = Key(name="alice", scope=Scope.READ, digest="2" * 64)
    for keys in ((), (renewed,), (Key(name="bob", scope=Scope.READ, digest="1" * 64),)):
        assert held.check(token, keys) is None
    monkeypatch.setattr(sessions.time, "time", lambda: ends)
    assert held.check(token, (alice,)) is None
    monkeypatch.undo()
    (tmp_path / SECRET).unlink()
    assert Sessions.of_store(tmp_path, 100).check(token, (alice,)) is None
    (tmp_path / SECRET).write_bytes(b"short")
    with pytest.raises(StoreError, match="not a secret"):
        Sessions.of_store(tmp_path, 100)


def test_wrong_keys_are_counted_by_client_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    wrong = WrongKeys(clock=lambda: now[0])
    assert [wrong.count("a") > 0 for _ in range(auth.BURST + 1)] == [False] * auth.BURST + [True]
    assert wrong.count("b") == 0
    now[0] += auth.EVERY_S
    assert wrong.count("a") == 0 and 0 < wrong.count("a") <= auth.EVERY_S
    now[0] += 1e6
    assert [wrong.count("a") > 0 for _ in range(auth.BURST + 1)] == [False] * auth.BURST + [True]
    monkeypatch.setattr(auth, "CLIENTS", 10)
    for n in range(1000):
        wrong.count(f"client-{n}")
    assert len(wrong._clients) <= 11


def test_hosts_and_scopes() -> None:
    loopback = {"127.0.0.1", "localhost", "LOCALHOST", "::1", "127.1.2.3"}
    for host in (*loopback, "0.0.0.0", "::", "", "10.0.0.1", "example.org", "127.0.0.1.example.org", "localhost."):
        assert is_loopback(host) == (host in loopback), host
    assert [host_name(h) for h in ("a:1", "a", "[::1]:80", "[::1]", "")] == ["a", "a", "::1", "::1", ""]
    assert scope_of("GET", "/new") is Scope.READ and scope_of("POST", "/new") is Scope.WRITE
    assert scope_of("POST", "/v1/gc") is Scope.ADMIN and scope_of("BREW", "/healthz") is Scope.WRITE
    assert scope_of("GET", "/healthz") is None and scope_of("GET", "/v1/session") is Scope.READ
