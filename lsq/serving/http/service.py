"""The routes of the service: POST /translate, GET /health, /metrics, and a page for trying it."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from lsq.serving.http.batcher import Batcher, Metrics, QueueFull
from lsq.serving.http.requests import Limits, parse
from lsq.serving.search_options import SearchOptions
from lsq.serving.translator import TextTranslator, Translation

PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src"
    " 'unsafe-inline'; img-src data:; connect-src 'self'; form-action 'none'; base-uri 'none';"
    " frame-ancestors 'none'",
}
"""The page loads nothing from elsewhere."""
GONE = 499
"""Status, in the metrics alone, of a request whose client went away."""
REQUEST_BYTES = 2**20
RECEIVE_SECONDS, TRANSLATE_SECONDS = 10.0, 60.0
"""Time for a body to arrive, and then for its request to be answered."""
RETRY = {"Retry-After": "1"}
CLOSE = {"Connection": "close"}
Result = TypeVar("Result")


class Gone(Exception):
    """The client went away."""


class Service:
    """The routes and their state; ValueError if `limits` refuse `options`, the defaults."""

    def __init__(self, translator: TextTranslator, options: SearchOptions, limits: Limits):
        try:
            limits.check(options, translator.model.longest_source)
        except ValueError as error:
            raise ValueError(
                f"every request without options of its own would be refused: {error}; give another"
                " --beam, --max-len-a or --max-len-b, or a higher --limit-beam or --limit-words"
            ) from None
        self.translator, self.options, self.limits = translator, options, limits
        self.metrics = Metrics()
        self.batcher = Batcher(translator, limits.queue, self.metrics)
        self.metrics.waiting.set_function(lambda: self.batcher.waiting)

    def application(self) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/translate", self.translate, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={HTTPException: _refused},
            lifespan=lambda _: self.batcher.at_work(),
        )

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE, headers=PAGE_HEADERS)

    async def health(self, request: Request) -> Response:
        model = self.translator.model
        changed = await asyncio.to_thread(model.changed)
        name = str(model.file).encode(errors="backslashreplace").decode()  # paths need not be UTF-8
        return JSONResponse({"status": "ok", "model": name, "model_changed": changed})

    async def show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def translate(self, request: Request) -> Response:
        """Answer {"text": [...], options} with {"translations": [{"text", "score", "alternatives"},
        ...]}, one for each line."""
        start, status = time.perf_counter(), 500
        try:
            response = await self._translated(request, await _body(request))
            status = response.status_code
            return response
        except HTTPException as refused:
            status = refused.status_code
            raise
        except asyncio.CancelledError:  # the server ends
            status = 503
            raise HTTPException(
                status, "the service has ended before this was translated", CLOSE
            ) from None
        except (Gone, ClientDisconnect):
            status = GONE
            return Response(status_code=GONE)
        finally:
            self.metrics.requests.labels(str(status)).inc()
            self.metrics.request_seconds.observe(time.perf_counter() - start)

    async def _translated(self, request: Request, body: bytes) -> Response:
        try:
            lines, prefixes, options = parse(body, self.options)
            self.limits.check(options, self.translator.model.longest_source)
            if len(lines) > self.limits.queue:
                raise QueueFull(alone=True)
            translations = await _unless_gone(
                request, self.batcher.translate(lines, prefixes, options)
            )
        except (ValueError, OverflowError) as error:
            raise HTTPException(400, str(error)) from None
        except QueueFull as full:
            if not full.alone:
                message = "too many sentences wait; try again later"
                raise HTTPException(503, message, RETRY) from None
            message = (
                f"the request has more than {self.limits.queue} sentences, which are all that may"
                " wait; send fewer at a time"
            )
            raise HTTPException(413, message) from None
        except TimeoutError:
            message = (
                f"not translated within {TRANSLATE_SECONDS:g} seconds; send fewer lines, or later"
            )
            raise HTTPException(503, message, RETRY) from None
        return JSONResponse({"translations": [_shown(of_line) for of_line in translations]})


async def _body(request: Request) -> bytes:
    """Read a request's body, to its end even if too large, so that the client gets an answer."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(RECEIVE_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= REQUEST_BYTES:
                    body += chunk
    except TimeoutError:
        if size <= REQUEST_BYTES:
            message = f"the request did not arrive within {RECEIVE_SECONDS:g} seconds"
            raise HTTPException(408, message, CLOSE) from None
    if size > REQUEST_BYTES:
        message = f"the request has more than {REQUEST_BYTES} bytes; send fewer lines at a time"
        raise HTTPException(413, message, CLOSE)
    return bytes(body)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Await `work`; cancel it if the client goes (Gone) or it takes too long (TimeoutError)."""
    working, going = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        done, _ = await asyncio.wait(
            (working, going), timeout=TRANSLATE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if working in done:
            return working.result()
        raise Gone if going in done else TimeoutError
    finally:
        for task in (working, going):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _shown(translations: list[Translation]) -> dict:
    best, *others = map(asdict, translations)
    return {**best, "alternatives": others}


async def _refused(request: Request, refused: HTTPException) -> Response:
    return JSONResponse({"error": refused.detail}, refused.status_code, refused.headers)
