"""What a person sees who watches the page, and what the buttons do."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from statetap.coordinator.page_files import PATHS
from tests.support.coordinator import make_dataset, register_engine, until
from tests.support.jobs import token_rows
from tests.support.service import Service, add_dataset, run

pytestmark = pytest.mark.timeout(120)
expect.set_options(timeout=15_000)

SUM = re.compile(r"([\d,]+) done \+ ([\d,]+) failed \+ ([\d,]+) skipped \+ ([\d,]+) open = ([\d,]+) rows")


def url(service: Service, job: str = "") -> str:
    return f"{service.api.http.base_url}/#/jobs/{job}" if job else str(service.api.http.base_url)


def row_of(page: Page, job: str) -> Locator:
    return page.locator("tr", has_text=job)


def card(page: Page, name: str) -> Locator:
    return page.locator(".card", has=page.get_by_text(name, exact=True)).locator("dd")


def test_a_job_is_watched_from_its_submission_to_its_end(service: Service, page: Page) -> None:
    """Seen to fail without the job's events: it stayed as it was when it was opened."""
    service.start(workers=2, delay_ms=20, tokens_per_s=8000)
    service.dataset(token_rows(1200, 60))
    page.goto(url(service))
    expect(page.get_by_text("No job yet.")).to_be_visible()
    expect(page.locator("tr", has_text="stub-engine")).to_contain_text("healthy")
    expect(page.locator("tr", has_text="ds-1")).to_contain_text("ready")
    job = service.api.submit("ds-1", name="first half")["job_id"]
    expect(row_of(page, job)).to_contain_text("running")
    expect(page.get_by_text("free on the store, of which running jobs still need")).to_be_visible()
    page.get_by_role("link", name="first half").click()
    expect(page.get_by_role("heading", name="first half")).to_be_focused()
    line = page.get_by_text(SUM)
    expect(line).to_be_visible()
    seen = set[int]()
    while len(seen) < 3:  # it moves while it is looked at
        done, failed, skipped, left, total = (int(n.replace(",", "")) for n in SUM.findall(line.inner_text())[0])
        assert done + failed + skipped + left == total == 1200
        seen.add(done)
        page.wait_for_timeout(100)
    assert int(card(page, "Tokens a second").inner_text().split()[0].replace(".", "")) > 0
    assert page.locator("svg.speed polyline").get_attribute("points")
    expect(page.get_by_text("1,200 done + 0 failed + 0 skipped + 0 open = 1,200 rows")).to_be_visible(timeout=40_000)
    expect(page.locator("main .state")).to_have_text("completed")
    path = service.path(job)
    expect(page.locator("pre")).to_contain_text(f"statetap verify {path}")
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    expect(card(page, "On the store")).to_contain_text(" of ")
    page.get_by_role("link", name="Overview").click()
    expect(row_of(page, job)).to_contain_text("1,200 of 1,200, 100 %")


def test_pause_resume_and_cancel(service: Service, page: Page) -> None:
    """Seen to fail with a page that draws all anew at each event: the focus was lost."""
    service.start(delay_ms=50, tokens_per_s=3000)
    service.dataset(token_rows(2000, 60))
    job = service.api.submit("ds-1")["job_id"]
    page.goto(url(service, job))
    pause, resume = page.get_by_role("button", name="Pause"), page.get_by_role("button", name="Resume")
    pause.click()
    expect(page.get_by_role("alert").filter(has_text="user")).to_be_visible()
    expect(resume).to_be_visible()
    expect(pause).to_be_hidden()
    assert service.api.job(job)["control"] == "pause"
    resume.click()
    expect(page.locator("main .state")).to_have_text("running")
    pause.focus()
    before = page.get_by_text(SUM).inner_text()
    expect(page.get_by_text(SUM)).not_to_have_text(before)
    expect(pause).to_be_focused()
    cancel = page.get_by_role("button", name="Cancel", exact=True)
    cancel.click()
    page.get_by_role("button", name="Leave it as it is").click()
    assert service.api.job(job)["control"] == "run"
    cancel.click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("main .state")).to_have_text("cancelled")
    expect(cancel).to_be_hidden()
    assert service.api.until_state(job, "cancelled")


def test_a_job_that_cannot_go_on_says_why(service: Service, page: Page) -> None:
    """Promise 5, by the page: within seconds, and without a reload."""
    service.start(delay_ms=50, tokens_per_s=3000)
    service.dataset(token_rows(2000, 60))
    job = service.api.submit("ds-1")["job_id"]
    page.goto(url(service, job))
    expect(page.locator("main .state")).to_have_text("running")
    service.rig.processes[0].kill()  # the engine
    expect(page.get_by_role("alert").filter(has_text="engine down: ")).to_contain_text("goes on by itself when the engine answers")
    page.goto(url(service))
    expect(row_of(page, job)).to_contain_text("paused")
    expect(row_of(page, job)).to_contain_text("engine down")
    expect(page.locator("tr", has_text="stub-engine")).to_contain_text("does not answer")


def test_rows_that_went_wrong_stand_with_their_line_and_the_next_step(service: Service, page: Page) -> None:
    """Seen to fail with a filter that asks for all codes, and with a job that is looked at no more when it has ended."""
    service.start()
    rows = [r if i % 4 else r * 400 for i, r in enumerate(token_rows(300, 20))]
    add_dataset(service.rig.store, rows, "ds-1", errors=dict.fromkeys(range(1, 300, 100), "bad_row"))
    job = run(service)
    assert job["state"] == "completed_with_errors" and job["errors"] == {"prompt_too_long": 75, "bad_row": 3}
    page.goto(url(service, job["job_id"]))
    lines = page.locator("section tbody tr")
    expect(lines).to_have_count(50)
    expect(lines.first).to_contain_text("prompt_too_long")
    expect(lines.nth(1)).to_contain_text("line 2")
    page.get_by_role("button", name="More rows").click()
    expect(lines).to_have_count(78)
    expect(page.get_by_role("button", name="More rows")).to_be_hidden()
    one = page.get_by_role("button", name="bad_row 3")
    one.click()
    expect(one).to_have_attribute("aria-pressed", "true")
    expect(lines).to_have_count(3)
    one.click()
    expect(lines).to_have_count(50)
    service.rig.processes[-1].kill()  # the worker
    service.post(f"/v1/jobs/{job['job_id']}/retry", codes=["bad_row"])  # by somebody else
    expect(page.get_by_text("75 skipped + 3 open")).to_be_visible()


def test_what_a_person_wrote_is_never_a_script(service: Service, page: Page) -> None:
    """A name is what anybody who submits may choose. The page fixture fails on a script's alert or error."""
    register_engine(service.rig.redis)
    name = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    make_dataset(service.rig.store, [5] * 10)
    job = service.api.submit("ds-0000000000000001", name=name)["job_id"]
    page.goto(url(service))
    expect(row_of(page, job)).to_contain_text("<img src=x")
    page.goto(url(service, "job-0000000000000000"))
    expect(page.get_by_role("alert")).to_contain_text("no job 'job-0000000000000000'")
    page.goto(url(service, job))
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    assert page.locator("main img, main script").count() == 0 and "owned'" in page.title() != "owned"
    for path in ("/", *PATHS):
        reply = service.api.http.get(path, headers={"Accept": "text/html"})
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and reply.headers["x-content-type-options"] == "nosniff"
        again = service.api.http.get(path, headers={"Accept": "text/html", "If-None-Match": reply.headers["etag"]})
        assert again.status_code == 304 and not again.content


def test_it_goes_on_over_a_restart_of_the_coordinator(service: Service, page: Page) -> None:
    """A proxy in front answers meanwhile. Seen to fail with an EventSource alone: it gives up on an answer that is no stream."""
    service.start(delay_ms=20, tokens_per_s=6000)
    service.dataset(token_rows(600, 60))
    job = service.api.submit("ds-1")["job_id"]
    page.goto(url(service, job))
    expect(page.get_by_role("status")).to_have_text("● live")
    page.route("**/events", lambda route: route.fulfill(status=502, body="bad gateway"))
    service.api.kill()
    with page.expect_response("**/events"):
        expect(page.get_by_role("status")).to_contain_text("not connected")
    page.unroute("**/events")
    service.api.start()
    expect(page.get_by_role("status")).to_have_text("● live")
    expect(page.locator("main .state")).to_have_text("completed", timeout=40_000)


def test_many_jobs_come_a_page_at_a_time_and_deleted_ones_go(service: Service, page: Page) -> None:
    register_engine(service.rig.redis)
    make_dataset(service.rig.store, [5] * 10)
    jobs = [service.api.submit("ds-0000000000000001", name=f"job {n}", reuse=False)["job_id"] for n in range(60)]
    for job in jobs:
        service.post(f"/v1/jobs/{job}/cancel")
    until(lambda: all(service.api.job(j)["state"] == "cancelled" for j in jobs), "they are cancelled", 30)
    page.goto(url(service))
    table = page.get_by_role("table", name="Jobs").locator("tbody tr")
    expect(table).to_have_count(50)
    expect(table.first).to_contain_text("job 59")
    page.get_by_role("button", name="Older jobs").click()
    expect(table).to_have_count(60)
    expect(page.get_by_role("button", name="Older jobs")).to_be_hidden()
    assert service.api.http.delete(f"/v1/jobs/{jobs[-1]}").status_code == 200
    expect(table).to_have_count(59, timeout=40_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_it(service: Service, browser: Browser, scheme: str) -> None:
    """Names, roles, contrast (axe-core). Seen to fail with a grey of too little contrast."""
    service.start(delay_ms=20, tokens_per_s=3000)
    service.dataset([r if i % 4 else r * 400 for i, r in enumerate(token_rows(400, 20))])
    job = service.api.submit("ds-1")["job_id"]
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    for place, there in ((url(service), "ready"), (url(service, job), "What went wrong")):
        page.goto(place)
        expect(page.get_by_text(there).first).to_be_visible()
        found = Axe().run(page).response["violations"]
        assert not found, json.dumps([(v["id"], [n["html"] for n in v["nodes"]]) for v in found], indent=1)
    context.close()


def test_it_fits_a_telephone(service: Service, browser: Browser) -> None:
    """Wide tables scroll in themselves; the page does not."""
    service.start()
    service.dataset(token_rows(20, 20))
    job = run(service)
    context = browser.new_context(viewport={"width": 390, "height": 800})
    page = context.new_page()
    for place in (url(service), url(service, job["job_id"])):
        page.goto(place)
        expect(page.get_by_text("completed").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def test_programs_get_links_at_the_same_address(service: Service) -> None:
    reply = httpx.get(url(service))
    assert reply.json()["links"]["jobs"] == "/v1/jobs" and reply.headers["vary"] == "Accept"
