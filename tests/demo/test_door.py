"""Requests that the page of `diffcache serve` lets in, and what it knows of who listens."""

import asyncio
import socket
from typing import Any

import pytest

pytest.importorskip("starlette.testclient", reason="starlette is not installed")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from diffcache.pipelines.demo import door
from diffcache.pipelines.demo.door import Listeners, PageGuard, guarded_by, hosts_of

HEARD = "/gradio_api/queue/data"


async def answer(request: Request) -> Response:
    body = await request.body()
    return PlainTextResponse(f"{len(body)} {request.headers.get('x-forwarded-host')}")


async def fail(request: Request) -> Response:
    raise KeyError(-1)


ROUTES = [
    Route("/gradio_api/run/predict", fail, methods=["POST"]),
    Route("/{path:path}", answer, methods=["GET", "POST"]),
]


def client(**settings: Any) -> TestClient:
    app = Starlette(routes=ROUTES, **guarded_by(Listeners(), "127.0.0.1", ["films.example"]))
    return TestClient(app, "http://localhost:7860", **settings)


def test_requests_of_the_page_pass_and_others_are_not_found() -> None:
    page = client()
    for path in ("/", "/config", "/assets/index.js", "/theme.css", HEARD, "/gradio_api/heartbeat/x"):
        assert page.get(path).status_code == 200, path
    for path in (
        "/monitoring",
        "/gradio_api/upload",
        "/gradio_api/file=/etc/passwd",
        "/openapi.json",
        "/gradio_api/call/start",
        "/gradio_api/token",
        "/gradio_api/dev/reload",
    ):
        assert page.post(path).status_code == page.get(path).status_code == 404, path
    assert page.post("/gradio_api/run/predict").status_code == 404  # a function that is not there
    assert page.get("/", headers={"X-Forwarded-Host": "evil.example"}).text == "0 None"


def test_bodies_are_bounded_and_hosts_are_the_pages_own() -> None:
    page = client()
    join = "/gradio_api/queue/join"
    assert page.post(join, content=b"x" * 65_536).text == "65536 None"
    assert page.post(join, content=b"x" * 65_537).status_code == 413
    assert page.post(join, content=iter([b"x" * 40_000] * 2)).status_code == 413  # of unknown length
    for host, code in (
        ("localhost:7860", 200),
        ("127.0.0.1", 200),
        ("films.example", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
    ):
        assert page.get("/", headers={"Host": host}).status_code == code, host


def test_hosts_of_a_page_that_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts_of("127.0.0.1") == ["127.0.0.1", "[::1]", "localhost"]
    assert hosts_of("::1") == hosts_of("127.0.0.1")
    assert {"localhost", socket.gethostname()} <= set(hosts_of("0.0.0.0"))


def test_a_page_listens_while_it_takes_what_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners, seen = Listeners(), []
    now = [100.0]
    monkeypatch.setattr(door.time, "monotonic", lambda: now[0])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            seen.append("me" in listeners)
            await send({"type": "http.response.body"})
            seen.append("me" in listeners)
            now[0] += door.PATIENCE + 1  # as long as a send that nobody reads
        seen.append("me" in listeners)

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "path": HEARD, "query_string": b"session_hash=me", "headers": []}
    asyncio.run(PageGuard(app, listeners)(scope, None, send))  # type: ignore[arg-type]
    assert seen == [False, True, False, True, False] and "me" not in listeners
    assert "you" not in listeners
