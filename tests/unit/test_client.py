"""The client without a network: its flows driven by hand, its parsers, and that both clients are the same."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import statetap
from statetap.client import ApiError, AsyncClient, Client, Dataset, Job, UnreachableError, WaitTimeoutError, calls, flows
from statetap.client.connection import arguments, policy_of, settings
from statetap.client.flows import Chunk, Emit, Open, Policy, Read, Send, Sleep
from statetap.client.sse import MAX_EVENT, Decoder, Event
from statetap.contracts.errors import SPECS, ErrorCode, StatetapError

JOB: dict[str, Any] = {
    "job_id": "job-1",
    "dataset_id": "ds-1",
    "state": "running",
    "rows": {"total": 10, "done": 3, "open": 7},
    "version": 5,
}


class Player:
    """Does a flow's steps from a script, and keeps its own clock: a Sleep takes as long as it says, everything else no time."""

    def __init__(self, *script: Any) -> None:
        self.now = 0.0
        self.script = list(script)
        self.sent: list[calls.Call[Any]] = []
        self.slept: list[float] = []
        self.emitted: list[Any] = []
        self.policy = Policy(url="http://host:1", patience_s=30.0, clock=lambda: self.now)

    def play(self, flow: flows.Flow[Any]) -> Any:
        outcome: Any = None
        try:
            step = next(flow)
            while True:
                outcome = None
                match step:
                    case Emit(item):
                        self.emitted.append(item)
                    case Sleep(seconds):
                        self.slept.append(seconds)
                        self.now += seconds
                    case Read(path, offset, size):
                        outcome = path.read_bytes()[offset : offset + size]
                    case Send(call) | Open(call):
                        self.sent.append(call)
                        outcome = self.script.pop(0)
                    case Chunk():
                        outcome = self.script.pop(0)
                outcome = outcome(self.sent[-1]) if callable(outcome) else outcome
                step = flow.throw(outcome) if isinstance(outcome, Exception) else flow.send(outcome)
        except StopIteration as e:
            return e.value


def answer(status: int, data: Any = None, **headers: str) -> httpx.Response:
    return httpx.Response(status, content=b"" if data is None else json.dumps(data).encode(), headers=headers)


def problem(code: str, status: int, **more: Any) -> httpx.Response:
    known = SPECS.get(ErrorCode(code)) if code in set(ErrorCode) else None
    body = {"code": code, "detail": "what is wrong", "status": status, "retryable": known.retryable if known else False, **more}
    return answer(status, body)


CUT = httpx.ReadError("cut")
REFUSED = httpx.ConnectError("refused")


# ------------------------------------------------------------------ retries
def test_what_can_be_repeated_is_tried_again_until_it_is_answered() -> None:
    player = Player(CUT, problem("redis_unavailable", 503), REFUSED, answer(200, JOB))
    job = player.play(flows.send(calls.job("job-1"), player.policy))
    assert job.job_id == "job-1" and job.rows.done == 3
    assert len(player.sent) == 4 and player.slept == sorted(player.slept)  # longer and longer


def test_patience_ends_with_the_last_error_and_its_next_step() -> None:
    player = Player(*[REFUSED] * 100)
    with pytest.raises(UnreachableError, match=r"http://host:1 .*refused") as e:
        player.play(flows.send(calls.job("job-1"), player.policy))
    assert e.value.code == "coordinator_unreachable" and "statetap up" in e.value.next_step
    assert 20 < player.now <= 30


def test_what_cannot_be_repeated_is_sent_again_only_when_it_never_arrived() -> None:
    player = Player(REFUSED, answer(200, JOB))
    player.play(flows.send(calls.retry("job-1", None), player.policy))
    for lost in (CUT, problem("redis_unavailable", 503)):
        player = Player(lost)
        with pytest.raises(ApiError):
            player.play(flows.send(calls.retry("job-1", None), player.policy))
        assert not player.slept


def test_a_submission_keeps_its_idempotency_key_over_repeats_and_takes_a_new_one_for_the_next() -> None:
    player = Player(CUT, problem("idempotency_in_flight", 409), answer(202, JOB), answer(202, JOB), answer(202, JOB))
    player.play(flows.send(calls.submit_job("ds-1", None, rows=5), player.policy))
    player.play(flows.send(calls.submit_job("ds-1", None, rows=5), player.policy))
    player.play(flows.send(calls.submit_job("ds-1", "mine"), player.policy))
    keys = [c.headers["Idempotency-Key"] for c in player.sent]
    assert len(set(keys[:3])) == 1 and len(set(keys)) == 3 and keys[-1] == "mine"
    assert player.sent[0].json == {"dataset_id": "ds-1", "rows": 5}


def test_retry_after_is_kept_to() -> None:
    player = Player(problem("redis_unavailable", 503), answer(200, JOB))
    player.script[0].headers["Retry-After"] = "3"
    player.play(flows.send(calls.job("job-1"), player.policy))
    assert player.slept == [3.0]


def test_a_refusal_is_not_repeated_and_carries_what_the_coordinator_said() -> None:
    numbers = {"needed": 5, "free": 2}
    player = Player(problem("store_full", 507, numbers=numbers, next_step="Free space.", field="rows", start_command="statetap up"))
    with pytest.raises(StatetapError) as caught:
        player.play(flows.send(calls.submit_job("ds-1", None), player.policy))
    e = caught.value
    assert isinstance(e, ApiError)
    assert (e.code, e.status, e.numbers, e.next_step, e.field, e.start_command) == (
        "store_full", 507, numbers, "Free space.", "rows", "statetap up",
    )  # fmt: skip
    assert str(e) == "store_full: what is wrong"


def test_codes_and_answers_of_others_are_errors_too() -> None:
    for reply, text in (
        (problem("code_of_tomorrow", 418), "code_of_tomorrow: what is wrong"),
        (httpx.Response(502, content=b"<html>bad\ngateway</html>"), "internal: HTTP 502: <html>bad gateway</html>"),
        (answer(200, ["no job"]), "GET /v1/jobs/job-1: the answer is not one of Statetap's API"),
        (httpx.Response(200, content=b"hello"), "the answer is not one of Statetap's API"),
    ):
        player = Player(reply)
        with pytest.raises(ApiError) as e:
            player.play(flows.send(calls.job("job-1"), player.policy))
        assert text in str(e.value) and e.value.code == "internal"


def test_pages_are_asked_for_one_at_a_time() -> None:
    player = Player(answer(200, {"items": [JOB, JOB], "next_cursor": "c"}), answer(200, {"items": [JOB], "next_cursor": None}))
    player.play(flows.pages(lambda cursor: calls.jobs(cursor, state=["running", "paused"]), player.policy))
    assert len(player.emitted) == 3
    assert [c.params.get("cursor") for c in player.sent] == [None, "c"]
    assert arguments(player.sent[1])["params"] == {"cursor": "c", "state": ["running", "paused"]}


def test_records_ignore_what_they_do_not_know_and_fill_in_what_is_missing() -> None:
    job = Job.from_dict({**JOB, "colour": "red", "rows": {"total": 2, "shade": 1}, "eta_s": None})
    assert job.rows.total == 2 and job.rates.tokens_per_s == 0 and job.eta_s is None and not job.ended
    assert Job.from_dict(job.to_dict()) == job
    with pytest.raises(TypeError):
        Job.from_dict({"state": "running"})


# ------------------------------------------------------------------ datasets
def test_a_small_file_goes_as_one_form_and_a_repeat_sends_it_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"rows")
    told: list[tuple[int, int]] = []
    player = Player(CUT, answer(202, {"dataset_id": "ds-1", "state": "ingesting"}))
    player.play(flows.upload([path], player.policy, {"truncate": True, "name": "n"}, progress=lambda *p: told.append(p)))
    made = [arguments(c) for c in player.sent]
    assert (
        made[0] == made[1] and made[0]["files"]["file"][:2] == ("a.jsonl", b"rows") and made[0]["data"] == {"truncate": "true", "name": "n"}
    )
    assert told == [(0, 4), (4, 4)]


class Uploads:
    """The coordinator's side of a resumable upload: keeps what arrived, refuses a wrong offset."""

    def __init__(self, size: int) -> None:
        self.size, self.kept = size, b""

    def state(self, _: Any = None) -> httpx.Response:
        return answer(200, {"upload_id": "up-1", "size": self.size, "offset": len(self.kept)})

    def patch(self, keep: int | None = None) -> Callable[[calls.Call[Any]], Any]:
        """``keep``: the connection is cut after so many bytes arrived."""

        def do(call: calls.Call[Any]) -> Any:
            assert call.method == "PATCH" and call.content is not None
            if int(call.headers["Upload-Offset"]) != len(self.kept):
                return problem("conflict", 409, numbers={"offset": len(self.kept)})
            self.kept += call.content if keep is None else call.content[:keep]
            return answer(204, **{"Upload-Offset": str(len(self.kept))}) if keep is None else CUT

        return do


def test_a_cut_upload_goes_on_where_the_coordinator_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "BLOCK", 10)
    path, data = tmp_path / "a.jsonl", bytes(range(35))
    path.write_bytes(data)
    there = Uploads(35)
    told: list[int] = []
    player = Player(
        there.state, there.patch(), there.patch(keep=4), there.state, there.patch(keep=0), there.state, there.patch(), there.patch(), there.patch(),
        answer(202, {"dataset_id": "ds-1", "state": "ingesting"}),
    )  # fmt: skip
    ids: list[str] = []
    player.play(flows.upload([path], player.policy, {}, progress=lambda sent, _: told.append(sent), started=ids.append, resumable_above=10))
    assert ids == ["up-1"]
    assert there.kept == data and not player.script
    assert player.sent[-1].json == {"upload_id": "up-1"}
    assert told == sorted(told) and told[-1] == 35 and 14 in told


def test_an_upload_that_gets_nowhere_is_given_up_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(20))
    there = Uploads(20)
    player = Player(there.state, *[there.patch(keep=0), there.state] * 50)
    with pytest.raises(UnreachableError, match=r"upload up-1 stands at 0 of 20 bytes"):
        player.play(flows.upload([path], player.policy, {}, resumable_above=10))
    assert player.now <= 31
    player = Player(there.state, there.patch(), answer(202, {"dataset_id": "ds-1", "state": "ready"}))
    player.play(flows.upload([path], player.policy, {}, resume="up-1"))
    assert there.kept == bytes(20)
    with pytest.raises(StatetapError, match="is of 20 bytes and"):
        path.write_bytes(bytes(21))
        player = Player(there.state)
        player.play(flows.upload([path], player.policy, {}, resume="up-1"))


def test_several_files_become_one_dataset_in_their_order(tmp_path: Path) -> None:
    paths = [tmp_path / n for n in ("a.jsonl", "b.jsonl")]
    for p in paths:
        p.write_bytes(b"12345")
    uploads = [Uploads(5), Uploads(5)]
    names = iter(["up-a", "up-b"])
    script: list[Any] = []
    for u in uploads:
        script += [lambda _: answer(201, {"upload_id": next(names), "size": 5, "offset": 0}), u.patch()]
    player = Player(*script, answer(202, {"dataset_id": "ds-1", "state": "ingesting"}))
    told: list[tuple[int, int]] = []
    player.play(flows.upload(paths, player.policy, {"format": "tokenized"}, shuffle=7, progress=lambda *p: told.append(p)))
    assert player.sent[-1].json == {"sources": [{"upload_id": "up-a"}, {"upload_id": "up-b"}], "shuffle": 7, "format": "tokenized"}
    assert told[-1] == (10, 10)
    with pytest.raises(StatetapError, match="is not a file"):
        player.play(flows.upload([tmp_path / "none"], player.policy, {}))


def test_waiting_for_a_dataset_ends_with_it_or_says_why_not() -> None:
    ingesting = answer(200, {"dataset_id": "ds-1", "state": "ingesting"})
    seen: list[Dataset] = []
    player = Player(ingesting, answer(200, {"dataset_id": "ds-1", "state": "ready"}))
    assert player.play(flows.wait_for_dataset("ds-1", player.policy, progress=seen.append)).state == "ready"
    assert [d.state for d in seen] == ["ingesting", "ready"]
    player = Player(answer(200, {"dataset_id": "ds-1", "state": "failed", "error": {"message": "no row"}, "errors": {"bad_row": 2}}))
    with pytest.raises(ApiError, match=r"dataset_failed: ds-1: no row \{'bad_row': 2\}"):
        player.play(flows.wait_for_dataset("ds-1", player.policy))
    player = Player(*[ingesting] * 50)
    with pytest.raises(WaitTimeoutError) as e:
        player.play(flows.wait_for_dataset("ds-1", player.policy, timeout_s=3))
    assert isinstance(e.value, TimeoutError) and e.value.code == "dataset_not_ready"


# ------------------------------------------------------------------ events
def stream(*jobs: dict[str, Any] | str) -> list[Any]:
    """An open stream and its chunks, to its end."""
    opened = httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"})
    chunks = [j.encode() if isinstance(j, str) else f"event: job\nid: {j['version']}\ndata: {json.dumps(j)}\n\n".encode() for j in jobs]
    return [opened, *chunks, b""]


def at(version: int, state: str = "running") -> dict[str, Any]:
    return {**JOB, "version": version, "state": state}


def test_events_go_on_over_a_cut_with_the_last_id_and_nothing_older_is_shown() -> None:
    cut = stream(at(5), at(6))
    cut[-1] = CUT
    player = Player(answer(200, at(4)), *cut, answer(200, at(6)), *stream(at(4), at(7), at(8, "completed")))
    player.play(flows.events("job-1", player.policy))
    assert [j.version for j in player.emitted] == [4, 5, 6, 7, 8]
    assert [c.headers.get("Last-Event-ID") for c in player.sent] == [None, "4", None, "6"]
    assert [c.path for c in player.sent] == ["/v1/jobs/job-1", "/v1/jobs/job-1/events"] * 2


def test_a_stale_end_in_the_stream_does_not_end_a_job_that_was_opened_again() -> None:
    player = Player(answer(200, at(7)), *stream(at(6, "failed")), answer(200, at(7)), *stream(at(8, "completed")))
    player.play(flows.events("job-1", player.policy))
    assert [(j.version, j.state) for j in player.emitted] == [(7, "running"), (8, "completed")]


def test_an_end_that_fell_into_the_cut_is_seen_by_the_get() -> None:
    player = Player(answer(200, at(4)), *stream(at(5)), answer(200, at(9, "failed")))
    player.play(flows.events("job-1", player.policy))
    assert [(j.version, j.state) for j in player.emitted] == [(4, "running"), (5, "running"), (9, "failed")]
    player = Player(answer(200, at(9, "failed")))
    player.play(flows.events("job-1", player.policy))
    assert [j.state for j in player.emitted] == ["failed"]


def test_without_an_event_stream_the_job_is_asked_for() -> None:
    for refusal in (problem("not_found", 404), answer(405), answer(200, {})):
        player = Player(answer(200, at(0)), refusal, answer(200, at(0)), answer(200, at(0, "cancelled")))
        player.play(flows.events("job-1", player.policy))
        assert [j.state for j in player.emitted] == ["running", "running", "cancelled"]
    player = Player(answer(200, at(4)), problem("redis_unavailable", 503), answer(200, at(5)), *stream(at(6, "completed")))
    player.play(flows.events("job-1", player.policy))
    assert [j.version for j in player.emitted] == [4, 5, 6]
    player = Player(problem("not_found", 404))
    with pytest.raises(ApiError, match="not_found"):
        player.play(flows.events("job-none", player.policy))


def test_heartbeats_show_that_the_stream_lives() -> None:
    for heartbeats, versions in ((False, [5, 6]), (True, [5, 5, 6])):
        player = Player(answer(200, at(5)), *stream(": hello\n\n", at(6, "completed")))
        player.play(flows.events("job-1", player.policy, heartbeats=heartbeats))
        assert [j.version for j in player.emitted] == versions


def test_a_wait_ends_in_time_although_the_stream_says_nothing_new() -> None:
    class Slow(Player):
        """Each chunk is a heartbeat after 10 s."""

        def beat(self, _: Any) -> bytes:
            self.now += 10
            return b": hello\n\n"

    player = Slow()
    opened = stream()[0]
    player.script += [answer(200, at(5)), opened, player.beat, player.beat, *[answer(200, at(5)) for _ in range(60)]]
    with pytest.raises(WaitTimeoutError, match=r"job-1 has not ended after 30 s: running 3/10 rows") as e:
        player.play(flows.wait("job-1", player.policy, timeout_s=30))
    assert 30 <= player.now < 31.5 and e.value.code == "incomplete"
    player = Player(answer(200, at(5)), *stream(at(6, "completed_with_errors")))
    assert player.play(flows.wait("job-1", player.policy)).state == "completed_with_errors"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_event_decoder_gives_the_same_wherever_the_bytes_are_cut(end: str) -> None:
    lines = [
        "retry: 2000",
        ": beat",
        "event: job",
        "id: 7",
        'data: {"a":',
        "data:  1}\u2028\x0b",
        "",
        "data: é",
        "",
        "event: empty",
        "",
        "id: 8",
        "data",
        "",
    ]
    raw = (end.join(lines) + end).encode()
    wanted = [
        Event(comment=True),
        Event(name="job", data='{"a":\n 1}\u2028\x0b', id="7"),
        Event(data="é", id="7"),
        Event(data="", id="8"),
    ]
    for size in (1, 2, 3, 5, 8, len(raw)):
        decoder = Decoder()
        found = [e for i in range(0, len(raw), size) for e in decoder.feed(raw[i : i + size])]
        found += decoder.feed(b"x")  # whatever follows: a CR at the very end waits for it
        assert found == wanted and decoder.retry_s == 2.0


def test_a_stream_without_line_ends_does_not_fill_the_memory() -> None:
    decoder = Decoder()
    with pytest.raises(ValueError, match="without an end"):
        for _ in range(MAX_EVENT // (1 << 20) + 1):
            decoder.feed(b"x" * (1 << 20))


# ------------------------------------------------------------------ who we are
def test_the_key_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATETAP_API_KEY", "st_secret")
    with Client("http://127.0.0.1:9", patience_s=0) as client:
        assert client._http.headers["Authorization"] == "Bearer st_secret"
        with pytest.raises(UnreachableError) as e:
            client.job("job-1")
        for text in (repr(client), str(client), str(e.value), repr(e.value), repr(client.__dict__), repr(e.value.__cause__)):
            assert "secret" not in text
    assert "Authorization" not in settings(policy_of(None, 1), "")["headers"]
    with pytest.raises(StatetapError) as refused:
        Client(api_key="st_se cret\n x")
    assert "se cret" not in str(refused.value)


def test_a_url_that_is_none_or_holds_a_password_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("127.0.0.1:8700", "ftp://host", "http://", "http://host/?a=1", "http://[::1"):
        with pytest.raises(StatetapError, match="url:"):
            Client(url)
    with pytest.raises(StatetapError) as e:
        Client("http://me:hunter2@host:1")
    assert "hunter2" not in str(e.value)
    monkeypatch.setenv("STATETAP_URL", "http://elsewhere:1/")
    assert Client().url == "http://elsewhere:1"
    assert Client("http://here:2").url == "http://here:2"
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert settings(policy_of("http://localhost:1", 1), None)["trust_env"] is False  # a proxy is for others than this host
    assert settings(policy_of("http://elsewhere:1", 1), None)["trust_env"] is True


def test_an_id_cannot_leave_its_place_in_the_path() -> None:
    assert calls.job("../../metrics?x#y").path == "/v1/jobs/..%2F..%2Fmetrics%3Fx%23y"


def test_both_clients_have_the_same_methods() -> None:
    def public(cls: type) -> dict[str, inspect.Signature]:
        return {n: inspect.signature(f) for n, f in vars(cls).items() if callable(f) and not n.startswith("_")}

    sync, asynchronous = public(Client), public(AsyncClient)
    assert sync.keys() == asynchronous.keys()
    for name, signature in sync.items():
        assert signature.parameters == asynchronous[name].parameters, name
        iterates = str(signature.return_annotation).startswith("Iterator")
        assert inspect.iscoroutinefunction(getattr(AsyncClient, name)) != iterates, name
        assert str(signature.return_annotation).replace("Iterator", "AsyncIterator") == str(asynchronous[name].return_annotation), name


def test_the_package_offers_the_clients_and_does_not_load_them_unasked() -> None:
    assert statetap.Client is Client and statetap.AsyncClient is AsyncClient
    with pytest.raises(AttributeError):
        _ = statetap.Server
    code = "import sys, statetap, statetap.contracts.errors; print('httpx' in sys.modules, statetap.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", statetap.__version__]
