"""docs/howto/external-redis.md: a user of Redis with the rights that the page grants is enough for everything that the service does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.cli import statetap
from tests.support.howto import FOLDER, commands
from tests.support.jobs import token_rows
from tests.support.redis import RedisServer
from tests.support.service import Service
from tests.support.workers import eventually

REFUSED = {"client", "client|list", "client|setname"}  # RQ asks for its own address, and does without


def test_the_service_needs_no_right_that_the_page_does_not_grant(tmp_path: Path, redis_server: RedisServer) -> None:
    """Pause, resume, a killed horse, a failed row that is retried, a cancelled and a deleted job are in it, so that each script runs.

    Seen to fail without ``~rq:*`` and with ``-@scripting``.
    """
    (command,) = (c for c in commands((FOLDER / "external-redis.md").read_text()) if c.begins("redis-cli"))
    with redis_server.client() as admin:
        admin.execute_command(*command.words[command.words.index("ACL") :])
        url = redis_server.url.replace("redis://", "redis://statetap:PASSWORD@")
        with Service(tmp_path, url, window=8) as service:
            rows = token_rows(300, 40, vocab=30_000)
            rows[200][5] = 31_000
            service.dataset(rows)
            service.start("nan@token=31000:3", workers=2, delay_ms=100)
            job = service.api.submit("ds-1")["job_id"]
            eventually("rows are prefilled", lambda: service.rig.stats()["requests"] > 30)
            service.post(f"/v1/jobs/{job}/pause")
            service.post(f"/v1/jobs/{job}/resume")
            workers = [p for p in service.rig.processes if p.name.startswith("worker")]
            eventually("one of them is at the batch again", lambda: next(filter(None, (w.horse() for w in workers)), None)).kill()
            assert service.api.until_state(job, "completed_with_errors", seconds=60)["rows"]["failed"] == 1
            service.post(f"/v1/jobs/{job}/retry")
            assert service.api.until_state(job, "completed", seconds=60)["rows"]["done"] == 300
            other = service.api.submit("ds-1", reuse=False)["job_id"]
            service.post(f"/v1/jobs/{other}/cancel")
            service.api.until_state(other, "cancelled", seconds=30)
            said = statetap(
                "doctor", "--redis-url", url, "--store", service.rig.store, "--cpu", "--json", url=str(service.api.http.base_url)
            )
        found = [json.loads(line) for line in said.out.splitlines()]
        assert [f["level"] for f in found if f["subject"] == "redis"][:3] == ["ok"] * 3, found
        denied = {entry["object"] for entry in admin.acl_log() if entry["username"] == "statetap"}
        assert denied <= REFUSED, denied
