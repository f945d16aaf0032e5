"""Requests to the running page that nobody reads, or that break off: places of viewers are free."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gradio", reason="gradio is not installed")

from diffcache.pipelines.demo import door, serve, showing
from tests.demo.test_showing import PROGRAM
from tests.demo.test_stream import films


def until(true: Callable[[], bool]) -> None:
    """Wait for something to be true, a minute of this machine at most."""
    latest = time.perf_counter() + 60
    while not true():
        assert time.perf_counter() < latest
        time.sleep(0.02)


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> socket.socket:
    """Send a request, and return the connection, of which nothing is read."""
    coded = json.dumps(body).encode() if body is not None else b""
    lines = [
        f"{'POST' if coded else 'GET'} /gradio_api/{path} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(coded)}",
        "",
        "",
    ]
    found = socket.create_connection(("127.0.0.1", port), timeout=60)
    found.sendall("\r\n".join(lines).encode() + coded)
    return found


def join(port: int, start: int, who: str) -> None:
    """Press Start, as a page of this session."""
    data = ["red", "window", showing.ALONE, 0, 4, "16 x 24", ""]
    order = {"data": data, "fn_index": start, "session_hash": who, "trigger_id": None}
    with asked(port, "queue/join", order) as connection:
        assert b" 200 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.slow
def test_places_are_free_after_joins_that_nobody_reads_and_pages_that_break_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead, real = [0.0], time.monotonic
    port = serve.free_port("127.0.0.1", 0)
    with serve.served(PROGRAM, ["127.0.0.1"], port) as (_, page, viewers):
        start = next(number for number, fn in page.fns.items() if fn.name == "start")
        monkeypatch.setattr(door.time, "monotonic", lambda: real() + ahead[0])
        for number in range(20):
            join(port, start, f"unread-{number}")
        assert len(viewers) == 0  # they take no place, not for a moment
        ahead[0] += 10.5  # they have been waited for
        until(lambda: viewers.waited_for == 0)

        for number in range(30):  # each as soon as its film runs
            join(port, start, name := f"dropped-{number}")
            with asked(port, f"queue/data?session_hash={name}") as reader:
                until(lambda name=name: viewers.find(name) is not None)  # type: ignore[misc]
                assert b" 200 " in reader.recv(4096)
            until(lambda: len(viewers) < PROGRAM.viewers)
        until(lambda: len(viewers) == 0)

        join(port, start, "me")  # whoever comes then is served
        with asked(port, "queue/data?session_hash=me") as reader:
            until(lambda: viewers.find("me") is not None)
            told = b""
            while b"/9j/" not in told:  # a JPEG in base64 begins so
                told += reader.recv(65536)
    until(lambda: not films())
