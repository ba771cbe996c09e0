"""The live page: the report of a run, served over HTTP while the run executes.

The server is a process of its own that reads the run's folder, so it costs the run nothing. It is read-only: every
address needs the token that is part of it, no other site may read it (no CORS, and the name of the host is checked),
and the page may load nothing from elsewhere. Without TLS and a token of the user's it serves this host only.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from pipedist.errors import UsageError
from pipedist.report.data import Data, collect
from pipedist.report.page import content_policy, embedded, page

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

INTERVAL_S = 1.0  # between two updates of the page
VIEWERS_MAX = 16  # pages that are updated at one time
TOKEN_CHARS_MIN = 16
LAST_S = 5.0  # for pages to get the last state, after the end of the run
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Where the live page is served.

    Args:
        address: HOST:PORT; the port 0 is a free one.
        token_file: file of the token; "": a random one.
        cert, key: PEM files of the server's certificate and its key; "": no TLS.
    """

    address: str = "127.0.0.1:0"
    token_file: str = ""
    cert: str = ""
    key: str = ""

    def checked(self) -> tuple[str, int, str]:
        """Return host, port and token; raise UsageError if that would serve the page unprotected."""
        host, colon, port = self.address.rpartition(":")
        host = host.strip("[]")
        if not colon or not host or not port.isdecimal() or int(port) > 65_535:
            raise UsageError(f"{self.address!r} is not an address: give HOST:PORT, such as 127.0.0.1:8080")
        if not _is_loopback(host) and not (self.token_file and self.cert and self.key):
            raise UsageError(
                f"{host} can be reached from other hosts, so the live page needs a token of your own and TLS: add "
                "--live-token-file FILE --live-cert FILE --live-key FILE, or serve it on 127.0.0.1 and forward the port"
            )
        if bool(self.cert) != bool(self.key):
            raise UsageError("--live-cert and --live-key are given together: a certificate and its key")
        return host, int(port), self._token()

    def _token(self) -> str:
        if not self.token_file:
            return secrets.token_urlsafe(24)
        try:
            token = Path(self.token_file).read_text().strip()
        except (OSError, ValueError) as error:
            raise UsageError(f"the token can't be read from {self.token_file}: {error}") from None
        if len(token) < TOKEN_CHARS_MIN or not token.replace("-", "").replace("_", "").isalnum():
            raise UsageError(
                f"the token in {self.token_file} must have at least {TOKEN_CHARS_MIN} letters, digits, - and _"
            )
        return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_of(host: str) -> list[str]:
    """Return the names by which a browser may address a server that listens at `host`.

    A page of another site can make its name resolve to this host's loopback address; there, only names of this host are
    accepted. A server for other hosts has any name, and is protected by its token and TLS.
    """
    return ["localhost", "127.0.0.1", "[::1]", host, f"[{host}]"] if _is_loopback(host) else ["*"]


def application(read: Callable[[], Data], token: str, hosts: list[str]) -> Starlette:
    """Return the application that serves the page of a run.

    Args:
        read: returns the data of the run, called in a thread.
        token: the first part of every address.
        hosts: names of the host that a request may have.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route

    viewers = anyio.Semaphore(VIEWERS_MAX)

    def guarded(serve: Callable[[], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            if not hmac.compare_digest(request.path_params["token"].encode(), token.encode()):
                return PlainTextResponse("Not found", 404, headers=_HEADERS)
            response: Response = await serve()
            return response

        return endpoint

    async def index() -> Response:
        data = await anyio.to_thread.run_sync(read)
        policy = f"{content_policy(connects=True)}; frame-ancestors 'none'"
        headers = {**_HEADERS, "Content-Security-Policy": policy}
        return HTMLResponse(page(data, stream="events"), headers=headers)

    async def events() -> Response:
        try:
            viewers.acquire_nowait()
        except anyio.WouldBlock:
            return PlainTextResponse(f"{VIEWERS_MAX} pages are open: close one", 503, headers=_HEADERS)
        return StreamingResponse(updates(), media_type="text/event-stream", headers=_HEADERS)

    async def updates() -> AsyncIterator[str]:
        try:
            while True:
                data = await anyio.to_thread.run_sync(read)
                yield f"data: {embedded(data)}\n\n"
                if data["state"] != "running":
                    return
                await anyio.sleep(INTERVAL_S)
        finally:
            viewers.release()

    async def metrics() -> Response:
        from pipedist.report.metrics import CONTENT_TYPE, exposition

        data = await anyio.to_thread.run_sync(read)
        return PlainTextResponse(exposition(data), media_type=CONTENT_TYPE, headers=_HEADERS)

    routes = [
        Route("/{token}/", guarded(index), methods=["GET"]),
        Route("/{token}/events", guarded(events), methods=["GET"]),
        Route("/{token}/metrics", guarded(metrics), methods=["GET"]),
    ]
    return Starlette(
        routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)]
    )


async def serve(path: Path, options: LiveOptions, show: Callable[[str], None]) -> None:
    """Serve the live page of the run in a folder until the run ends.

    Args:
        path: the run's output folder.
        options: where to serve it.
        show: called once, with the address of the page.

    Raises:
        UsageError: there is no run in the folder, the address can't be used, or a package is missing.
    """
    try:
        import uvicorn
    except ImportError:
        raise UsageError("the live page needs starlette and uvicorn: pip install 'pipedist[live]'") from None
    host, port, token = options.checked()
    await anyio.to_thread.run_sync(lambda: collect(path, live=True))  # raises if there is no run
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(f"can't listen at {options.address}: {error.strerror or error}") from None
    port = listening.getsockname()[1]
    cache = _Cache(path)
    app = application(cache.read, token, names_of(host))
    try:
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            ssl_certfile=options.cert or None,
            ssl_keyfile=options.key or None,
            timeout_graceful_shutdown=int(LAST_S),
        )
        config.load()
    except (OSError, ssl.SSLError) as error:
        listening.close()
        raise UsageError(f"the certificate or its key can't be used: {error}") from None
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    scheme, shown = ("https" if options.cert else "http"), f"[{host}]" if ":" in host else host
    show(f"live page: {scheme}://{shown}:{port}/{token}/")

    async def end_with_run() -> None:
        while (await anyio.to_thread.run_sync(cache.read))["state"] == "running":  # noqa: ASYNC110 - another process
            await anyio.sleep(INTERVAL_S)
        server.should_exit = True

    with listening:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_with_run, name="end of the live page")
            await server.serve([listening])
            tasks.cancel_scope.cancel()


class _Cache:
    """The data of a run, read at most once for all pages in each interval."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._data: Data = {}
        self._read_at = -1e9

    def read(self) -> Data:
        with self._lock:
            if time.monotonic() - self._read_at >= INTERVAL_S / 2:
                self._data = collect(self._path, live=True)
                if self._data["state"] != "running":
                    self._data = collect(self._path)
                self._read_at = time.monotonic()
            return self._data
