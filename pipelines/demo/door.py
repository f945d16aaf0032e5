"""Let in requests for the page of `diffcache serve`, and know which viewers take its events.

Gradio serves many routes that the page has no use for: uploads fill the disk, and others tell of
its inside. Whatever the page does not ask for is not found.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 65_536  # of a request without pictures; a prompt has at most 2,000 letters
PATIENCE = 45.0  # seconds for which a page may take nothing; gradio sends a sign of life every 15
_API = "/gradio_api"
_EVENTS = f"{_API}/queue/data"
_ROUTES = frozenset({
    "/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", f"{_API}/info", _EVENTS,
    f"{_API}/queue/join", f"{_API}/run/predict", f"{_API}/startup-events", f"{_API}/app_id",
})  # fmt: skip
_FOLDERS = ("/assets/", "/static/", f"{_API}/heartbeat/")


class Listeners:
    """Pages that take their events, by session."""

    def __init__(self) -> None:
        self._taken: dict[str, float] = {}

    def take(self, who: str) -> None:
        """Note that a page has taken something."""
        self._taken[who] = time.monotonic()

    def leave(self, who: str) -> None:
        """Note that a page has closed its connection."""
        self._taken.pop(who, None)

    def __contains__(self, who: object) -> bool:
        taken = self._taken.get(str(who))
        return taken is not None and time.monotonic() - taken < PATIENCE


class PageGuard:
    """Refuse requests to unknown routes, and note in `listeners` the viewers that take their events."""

    def __init__(self, app: ASGIApp, listeners: Listeners) -> None:
        self.app, self.listeners = app, listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        if path not in _ROUTES and not path.startswith(_FOLDERS):
            await PlainTextResponse("Not Found", 404)(scope, receive, send)
            return
        # Gradio would have the page ask for everything at a host that anybody may name here.
        scope["headers"] = [h for h in scope["headers"] if h[0] != b"x-forwarded-host"]
        who = QueryParams(scope["query_string"]).get("session_hash", "")

        async def taken(message: Message) -> None:
            await send(message)  # waits while the other end reads nothing
            self.listeners.take(who)

        try:
            await self.app(scope, receive, taken if path == _EVENTS else send)
        except KeyError as error:  # gradio looks up a number that the request gives, unchecked
            await PlainTextResponse(f"no function {error}", 404)(scope, receive, send)
        finally:
            if path == _EVENTS:
                self.listeners.leave(who)


def guarded_by(listeners: Listeners, host: str, names: Sequence[str], most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return arguments of an application that lets in only the page's own requests, of at most `most_bytes`.

    Requests must ask for the `host` that the page is served at, or for one of the further `names`. `listeners` is kept
    up to date.
    """
    hosts = [*hosts_of(host), *names]
    return {
        "middleware": [
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(RequestBodyLimitMiddleware, max_body_size=most_bytes),
            Middleware(PageGuard, listeners=listeners),
        ]
    }


def hosts_of(host: str) -> list[str]:
    """Return the names by which a page at an address may be asked for: all of this machine for `0.0.0.0` and `::`."""
    own = {host, "localhost", "127.0.0.1", "::1"}
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
        own |= {name, socket.getfqdn()}
        for kind, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
            try:
                own |= {str(found[4][0]) for found in socket.getaddrinfo(name, None, kind)}
                with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                    probe.connect((elsewhere, 9))  # sends nothing; tells the address it would use
                    own.add(str(probe.getsockname()[0]))
            except OSError:
                continue
    return sorted(f"[{each}]" if ":" in each else each for each in own)
