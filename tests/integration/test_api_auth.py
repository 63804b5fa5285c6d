"""Who may do what, at a real coordinator process: keys, scopes, the page's cookie, requests of other origins, and secrets that stay secret."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from starlette.routing import BaseRoute, Mount, Route

from statetap.coordinator.app import create_app
from statetap.coordinator.auth import BURST
from statetap.coordinator.keyfile import Scope, add_key, digest, revoke_key
from statetap.coordinator.sessions import COOKIE, SECRET
from statetap.coordinator.settings import CoordinatorSettings
from tests.support.coordinator import Coordinator, make_dataset, register_engine, until
from tests.support.redis import RedisServer

NEEDS_NO_KEY = {("GET", "/healthz"), ("GET", "/readyz"), ("POST", "/v1/session"), ("DELETE", "/v1/session"), ("GET", "/")} | {
    ("GET", f"/page/{name}") for name in ("api.js", "app.js", "dom.js", "format.js", "job.js", "overview.js", "parts.js", "style.css")
}
LINE = b'{"input_ids": [1, 2, 3]}\n'


class Keys:
    """A keys file with a key of each scope."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.read, self.write, self.admin = (add_key(file, s.label, s) for s in Scope)

    @property
    def all(self) -> list[str]:
        return [self.read, self.write, self.admin]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def guarded(tmp_path: Path, redis_server: RedisServer, keys: Keys) -> Iterator[Coordinator]:
    (tmp_path / "data").mkdir()
    process = Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(keys.file), DATA_DIR=str(tmp_path / "data"))
    try:
        yield process.start()
    finally:
        process.close()


def operations() -> set[tuple[str, str]]:
    """(method, path) of everything that the application routes, parameters filled in."""
    found: set[tuple[str, str]] = set()

    def walk(routes: list[BaseRoute], prefix: str) -> None:
        for route in routes:
            if isinstance(route, Mount):
                found.add(("GET", f"{prefix}{route.path}/x"))
                walk(list(route.routes or []), prefix + route.path)
            elif isinstance(route, Route):
                found.update((m, re.sub(r"{[^}]*}", "x", prefix + route.path)) for m in route.methods or ())

    app = create_app(CoordinatorSettings())
    walk(app.routes, "")
    for path, methods in app.openapi()["paths"].items():
        found.update((m.upper(), re.sub(r"{[^}]*}", "x", path)) for m in methods)
    return found


def refused(reply: httpx.Response, status: int, code: str) -> bool:
    assert (reply.status_code, reply.json().get("code")) == (status, code), reply.text
    assert reply.headers["content-type"] == "application/problem+json" and reply.json()["next_step"]
    return True


def test_every_route_is_closed_unless_it_is_named_here(guarded: Coordinator, keys: Keys) -> None:
    routed = operations()
    assert routed >= {("GET", "/openapi.json"), ("POST", "/v1/jobs"), ("GET", "/v1/jobs/x"), *NEEDS_NO_KEY}
    for method, path in sorted(routed - NEEDS_NO_KEY):
        reply = guarded.http.request(method, path)
        assert reply.status_code == 401, (method, path)
        if method != "HEAD":
            refused(reply, 401, "unauthorized")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        if method in ("GET", "HEAD"):
            continue
        assert guarded.http.request(method, path, headers=bearer(keys.read)).status_code == 403, (method, path)
    assert guarded.http.get("/nothing/here").status_code == 401, "not even what there is can be learned"
    for method, path in sorted(NEEDS_NO_KEY):
        assert guarded.http.request(method, path).status_code in (200, 204, 422), (method, path)


def test_each_scope_includes_the_ones_before_it(guarded: Coordinator, keys: Keys, redis_client: redis.Redis) -> None:
    dataset_id = make_dataset(guarded.store, [5, 6])
    register_engine(redis_client)

    def submit(key: str, **fields: object) -> httpx.Response:
        return guarded.http.post("/v1/jobs", json={"dataset_id": dataset_id, **fields}, headers=bearer(key))

    for key in keys.all:
        assert guarded.http.get("/v1/jobs", headers=bearer(key)).status_code == 200
    denied = submit(keys.read)
    assert refused(denied, 403, "forbidden") and "write" in denied.json()["detail"] and keys.read not in denied.text
    assert submit(keys.write).status_code == 202
    assert refused(submit(keys.write, force=True), 403, "forbidden")
    assert submit(keys.admin, force=True).status_code == 202
    assert refused(guarded.http.post("/v1/gc", json={}, headers=bearer(keys.write)), 403, "forbidden")
    assert guarded.http.post("/v1/gc", json={}, headers=bearer(keys.admin)).status_code != 403


def test_wrong_keys_are_slowed_down_and_right_ones_are_not(guarded: Coordinator, keys: Keys) -> None:
    for header in ("Basic YTpi", f"Bearer{keys.read}", "", f"Token {keys.read}"):
        assert refused(guarded.http.get("/v1/jobs", headers={"Authorization": header}), 401, "unauthorized")
    wrong = [guarded.http.get("/v1/jobs", headers=bearer(f"st_{n:043}")) for n in range(BURST * 3)]
    assert [r.status_code for r in wrong[:BURST]] == [401] * BURST
    slowed = next(r for r in wrong if r.status_code != 401)
    assert refused(slowed, 429, "rate_limited") and int(slowed.headers["retry-after"]) >= 1
    wrong_login = {"json": {"key": "st_" + "x" * 43}}  # one may pass meanwhile; the next does not
    until(lambda: guarded.http.post("/v1/session", **wrong_login).status_code == 429, "a wrong login is slowed down too")
    assert guarded.http.get("/v1/jobs", headers=bearer(keys.read)).status_code == 200
    assert guarded.http.post("/v1/session", json={"key": keys.read}).status_code == 200


def test_keys_come_and_go_without_a_restart(guarded: Coordinator, keys: Keys) -> None:
    def status(key: str) -> int:
        return guarded.http.get("/v1/engines", headers=bearer(key)).status_code

    guarded.http.post("/v1/session", json={"key": keys.write})
    assert guarded.http.get("/v1/engines").status_code == 200, "by the cookie"
    revoke_key(keys.file, "write")
    until(lambda: status(keys.write) == 401, "the revoked key is refused")
    assert refused(guarded.http.get("/v1/engines"), 401, "unauthorized"), "the session ended with its key"
    new = add_key(keys.file, "bob", Scope.READ)
    until(lambda: status(new) == 200, "the new key is taken")
    with open(keys.file, "a") as f:
        f.write("half a line\n")
    revoke_key_by_hand = keys.file.read_text().replace(digest(keys.admin), digest("another"))
    keys.file.write_text(revoke_key_by_hand)
    until(lambda: status(keys.admin) == 401, "what was revoked is gone though a line is wrong")
    assert status(keys.read) == 200
    assert "line 4" in guarded.log.read_text()
    keys.file.unlink()
    until(lambda: status(keys.read) == 401, "without the file nobody comes in")


@pytest.mark.parametrize("one_job", [True, False])
def test_a_watch_ends_with_its_key(guarded: Coordinator, keys: Keys, redis_client: redis.Redis, one_job: bool) -> None:
    """Seen to fail with a key that is looked at when the watch begins, and never again."""
    register_engine(redis_client)
    dataset = make_dataset(guarded.store, [9] * 10)
    job = guarded.http.post("/v1/jobs", json={"dataset_id": dataset}, headers=bearer(keys.write)).json()["job_id"]
    url = f"/v1/jobs/{job}/events" if one_job else "/v1/events"
    with guarded.http.stream("GET", url, headers=bearer(keys.read)) as watch:
        lines = watch.iter_lines()
        assert any(line.startswith("data:") for line in lines)
        revoke_key(keys.file, "read")
        for _ in lines:  # QUIET_S at the most, and no client's timeout: it ends by itself
            pass
    assert refused(guarded.http.get(url, headers=bearer(keys.read)), 401, "unauthorized")


def start_fails(process: Coordinator) -> str:
    with pytest.raises(AssertionError):
        process.start()
    assert process.wait() == 2
    return process.log.read_text()


def test_it_does_not_start_open_to_a_network_or_with_a_file_that_does_not_parse(
    tmp_path: Path, redis_server: RedisServer, keys: Keys
) -> None:
    text = start_fails(Coordinator(tmp_path, redis_server.url, HOST="0.0.0.0"))
    assert "statetap keys add" in text and "STATETAP_ALLOW_NO_AUTH" in text
    text = start_fails(Coordinator(tmp_path, redis_server.url, HOST="127.0.0.1", PUBLISHED="0.0.0.0"))  # a container's port
    assert "STATETAP_PUBLISHED: 0.0.0.0" in text and "statetap keys add" in text
    wrong = tmp_path / "wrong"
    wrong.write_text(f"# of us\n\nalice write {digest(keys.read)}\nbob rw {digest(keys.write)}\n")
    assert "line 4" in start_fails(Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(wrong)))
    wrong.write_text(f"alice write {keys.read}\n")
    text = start_fails(Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(wrong)))
    assert "revoke that key" in text and keys.read not in text
    assert "statetap keys add" in start_fails(Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(tmp_path / "none")))


def test_a_closed_network_may_do_without_keys_and_each_start_says_so(tmp_path: Path, redis_server: RedisServer, keys: Keys) -> None:
    process = Coordinator(tmp_path, redis_server.url, HOST="0.0.0.0", ALLOW_NO_AUTH="true").start()
    try:
        assert "no authentication" in process.log.read_text()
        assert process.http.get("/v1/jobs", headers={"Host": "states.internal:8700"}).status_code == 200
        assert refused(process.http.post("/v1/session", json={"key": keys.read}), 409, "conflict")
        assert process.http.get("/v1/session").json() == {"name": "", "scope": "admin", "expires_at": None}
    finally:
        process.close()
    os.chmod(keys.file, 0o644)
    process = Coordinator(tmp_path, redis_server.url, HOST="0.0.0.0", KEYS_FILE=str(keys.file), METRICS_OPEN="1").start()
    try:
        assert "chmod o=" in process.log.read_text()
        assert process.http.get("/metrics").status_code != 401
        assert process.http.get("/v1/jobs").status_code == 401
        assert process.http.get("/v1/jobs", headers=bearer(keys.read) | {"Host": "states.internal"}).status_code == 200
    finally:
        process.close()


def test_a_port_that_is_published_on_loopback_needs_no_keys_and_shows_metrics_to_its_network(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    process = Coordinator(tmp_path, redis_server.url, HOST="0.0.0.0", PUBLISHED="127.0.0.1", METRICS_OPEN="1").start()
    try:
        assert process.http.get("/v1/jobs").status_code == 200
        assert process.http.get("/metrics", headers={"Host": "coordinator:8700"}).status_code == 200
        assert refused(process.http.get("/v1/jobs", headers={"Host": "coordinator:8700"}), 403, "forbidden")
    finally:
        process.close()


def test_without_keys_only_this_host_is_served_and_no_page_of_another_origin(coordinator: Coordinator) -> None:
    port = coordinator.http.base_url.port
    for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}", "127.8.9.1"):
        assert coordinator.http.get("/v1/jobs", headers={"Host": host}).status_code == 200, host
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", ""):
        assert refused(coordinator.http.get("/v1/jobs", headers={"Host": host}), 403, "forbidden"), host

    def post(**headers: str) -> httpx.Response:
        return coordinator.http.post(
            "/v1/datasets", files={"file": ("a.jsonl", LINE)}, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{port + 1}", "http://[", "x"):
        assert refused(post(Origin=origin), 403, "forbidden"), origin
    for site in ("cross-site", "same-site", "what"):
        assert refused(post(Sec_Fetch_Site=site, Origin=f"http://127.0.0.1:{port}"), 403, "forbidden"), site
    assert coordinator.http.get("/v1/datasets").json()["items"] == [], "nothing of it was done"
    assert coordinator.http.get("/v1/jobs", headers={"Origin": "https://evil.example"}).status_code == 200
    assert "access-control-allow-origin" not in coordinator.http.get("/v1/jobs", headers={"Origin": "https://evil.example"}).headers
    for headers in ({}, {"Origin": f"http://127.0.0.1:{port}"}, {"Sec_Fetch_Site": "same-origin"}, {"Sec_Fetch_Site": "none"}):
        assert post(**headers).status_code == 202, headers


def test_the_page_logs_in_by_a_cookie_that_a_script_cannot_read(guarded: Coordinator, keys: Keys) -> None:
    reply = guarded.http.post("/v1/session", json={"key": keys.write})
    assert (reply.json()["name"], reply.json()["scope"]) == ("write", "write")
    cookie = reply.headers["set-cookie"]
    parts = {p.strip().lower() for p in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/", "max-age=43200"} <= parts and "secure" not in parts
    assert keys.write not in cookie and keys.write not in reply.text
    assert guarded.http.get("/v1/session").json() == reply.json()
    assert guarded.http.get("/v1/session", headers=bearer(keys.admin)).json() == {"name": "admin", "scope": "admin", "expires_at": None}
    secure = guarded.http.post("/v1/session", json={"key": keys.read}, headers={"X-Forwarded-Proto": "https"})
    assert "secure" in {p.strip().lower() for p in secure.headers["set-cookie"].split(";")}

    token = reply.cookies[COOKIE]
    guarded.http.cookies.clear()

    def by(token: str, method: str = "GET", **headers: str) -> httpx.Response:
        sent = {"Cookie": f"{COOKIE}={token}".encode("latin-1"), **{k: v.encode() for k, v in headers.items()}}
        return guarded.http.request(method, "/v1/jobs/job-none" + ("" if method == "GET" else "/pause"), headers=sent)

    assert by(token).status_code == 404
    assert by(token, "POST").status_code == 404
    assert by(token, "POST", **{"Sec-Fetch-Site": "same-origin"}).status_code == 404
    assert refused(by(token, "POST", **{"Sec-Fetch-Site": "same-site"}), 403, "forbidden")
    assert refused(by(token, "POST", Origin="https://evil.example"), 403, "forbidden")
    assert refused(by(token, Authorization="Bearer st_wrong"), 401, "unauthorized"), "a key that was sent counts, whatever the cookie"
    name, ends, signature = token.split(":")
    for changed in (
        f"admin:{ends}:{signature}",
        f"{name}:{int(ends) + 1}:{signature}",
        token[:-1],
        f"{name}:{ends}:",
        "",
        "a:b:c",
        f"{name}:²:{signature}",
    ):
        assert refused(by(changed), 401, "unauthorized"), changed
    assert stat.S_IMODE((guarded.store / SECRET).stat().st_mode) == 0o600
    guarded.close()
    guarded.start()
    assert by(token).status_code == 404, "the session outlives a restart"
    out = guarded.http.delete("/v1/session")
    assert out.status_code == 204 and "max-age=0" in out.headers["set-cookie"].lower()
    assert refused(guarded.http.post("/v1/session", json={"key": keys.read}, headers={"Origin": "https://evil.example"}), 403, "forbidden")


def test_the_cookie_is_secure_where_the_operator_says_so(tmp_path: Path, redis_server: RedisServer, keys: Keys) -> None:
    process = Coordinator(tmp_path, redis_server.url, KEYS_FILE=str(keys.file), COOKIE_SECURE="true", SESSION_S="60").start()
    try:
        reply = process.http.post("/v1/session", json={"key": keys.read})
        parts = {p.strip().lower() for p in reply.headers["set-cookie"].split(";")}
        assert {"secure", "max-age=60"} <= parts
    finally:
        process.close()


def test_secrets_stay_out_of_log_command_line_store_answers_and_documents(
    tmp_path: Path, redis_server: RedisServer, redis_client: redis.Redis, keys: Keys
) -> None:
    password = "sekret-of-redis"
    register_engine(redis_client)
    redis_client.config_set("requirepass", password)
    url = redis_server.url.replace("redis://", f"redis://:{password}@")
    process = Coordinator(tmp_path, url, KEYS_FILE=str(keys.file), LOG_LEVEL="DEBUG").start()
    try:
        seen = []
        dataset_id = make_dataset(process.store, [5])
        submitted = process.http.post("/v1/jobs", json={"dataset_id": dataset_id, "force": True}, headers=bearer(keys.admin))
        assert submitted.status_code == 202, submitted.text
        seen.append(submitted)
        seen.append(process.http.post("/v1/session", json={"key": keys.write}))
        seen.append(process.http.post("/v1/session", json={"key": keys.read, "colour": keys.read}))
        seen.append(process.http.post("/v1/session", json={"key": [keys.read]}))
        seen.append(
            process.http.post("/v1/session", content=f'{{"key": "{keys.read}"'.encode(), headers={"content-type": "application/json"})
        )
        seen.append(process.http.get("/v1/jobs/nothing", headers=bearer(keys.admin)))
        seen.append(process.http.get("/openapi.json", headers=bearer(keys.read)))
        seen.append(process.http.get("/v1/jobs", headers=bearer(keys.read + "x")))
        redis_server.kill()
        seen.append(process.http.get("/readyz"))
        assert [r.status_code for r in seen[1:]] == [200, 422, 422, 422, 404, 200, 401, 503]
        command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.close()
    places = {"command line": command_line, "log": process.log.read_bytes(), "keys file": keys.file.read_bytes()}
    places |= {f"answer {i}": r.content + str(r.headers).encode() for i, r in enumerate(seen)}
    places |= {str(p): p.read_bytes() for p in process.store.rglob("*") if p.is_file()}
    assert len(places) > 12 and places["log"]
    for secret in (*keys.all, password):
        assert [where for where, data in places.items() if secret.encode() in data] == []
    secret = (process.store / SECRET).read_bytes()
    assert [w for w, data in places.items() if secret in data] == [str(process.store / SECRET)]


def test_the_document_says_who_may_call_what() -> None:
    document = create_app(CoordinatorSettings()).openapi()
    assert set(document["components"]["securitySchemes"]) == {"key", "session"}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answers = set(operation["responses"])
            if (method.upper(), path) in NEEDS_NO_KEY:
                assert "security" not in operation
                continue
            assert operation["security"] == [{"key": []}, {"session": []}], path
            assert {"401", "403"} <= answers, (method, path)
            assert operation["x-statetap-scope"] == ("admin" if path == "/v1/gc" else "read" if method in ("get", "head") else "write")
