"""One attempt of one request over HTTP, and the address that it goes to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import math
import threading
import time
from collections.abc import Callable

import aiohttp
import yarl

from apache_beam_vllm_dynamo._loop import LoopThread
from apache_beam_vllm_dynamo._requests import PreparedRequest
from apache_beam_vllm_dynamo._responses import MalformedResponseError, Response, parse_response
from apache_beam_vllm_dynamo._retry import Again, Refused, RetryReason, classify
from apache_beam_vllm_dynamo.errors import ConfigurationError


class Sender:
    """Sends to the one server of a client; runs on the loop's thread.

    Args:
      thread: The loop, with the connections.
      endpoint: Gives the base URL; may block, so it gets a thread of its own.
      on_error: Takes what ``endpoint`` raised.
    """

    def __init__(
        self,
        thread: LoopThread,
        endpoint: Callable[[], str],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._thread = thread
        self._endpoint = endpoint
        self._on_error = on_error
        self._lookup: asyncio.Future[yarl.URL] | None = None

    async def send(
        self, request: PreparedRequest, timeout_s: float, excerpt_chars: int
    ) -> Response | Again | Refused:
        """Makes one attempt, lasting at most ``timeout_s`` seconds."""
        lookup = self._lookup or self._look_up()
        try:
            if not lookup.done():
                # Shielded: the lookup is everybody's, and one request's end must not end it.
                await asyncio.wait_for(asyncio.shield(lookup), timeout_s)
            began = time.monotonic()
            url = _target(lookup.result(), request.target)
            async with self._thread.session.post(
                url,
                data=request.body,
                headers=request.headers or None,
                timeout=_timeout(timeout_s),
                allow_redirects=False,
            ) as response:
                body = await response.read()
        except TimeoutError:
            if not lookup.done():
                text = f'the address of the server was not known after {timeout_s:.1f} s'
                return Again(RetryReason.CONNECT, None, text)
            return Again(RetryReason.TIMEOUT, None, f'no answer within {timeout_s:.1f} s')
        except aiohttp.ClientConnectorError as error:
            self._outdate(lookup)
            return Again(RetryReason.CONNECT, None, f'no connection: {error.strerror}')
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError):
            self._outdate(lookup)
            text = 'the connection broke before the answer was complete'
            return Again(RetryReason.DISCONNECT, None, text)
        except aiohttp.ClientResponseError as error:
            return Again(RetryReason.MALFORMED, None, f'the answer is no HTTP: {error.status}')
        took_s = time.monotonic() - began
        if response.status == http.HTTPStatus.OK:
            try:
                return parse_response(request.endpoint, body)
            except MalformedResponseError as error:
                return Again(RetryReason.MALFORMED, 200, str(error))
        return classify(
            response.status, response.headers, body, took_s=took_s, excerpt_chars=excerpt_chars
        )

    def _outdate(self, lookup: asyncio.Future[yarl.URL]) -> None:
        # Only the first of all requests that failed with this address asks again.
        if self._lookup is lookup:
            self._lookup = None

    def _look_up(self) -> asyncio.Future[yarl.URL]:
        loop = asyncio.get_running_loop()
        lookup: asyncio.Future[yarl.URL] = loop.create_future()
        self._lookup = lookup

        def ask() -> None:
            try:
                found: yarl.URL | BaseException = _base_url(self._endpoint())
            except BaseException as error:  # noqa: BLE001  # raised by the waiting callers
                found = error
            # If the client was closed meanwhile, nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._looked_up, lookup, found)

        threading.Thread(target=ask, name='vllm-dynamo-endpoint', daemon=True).start()
        return lookup

    def _looked_up(self, lookup: asyncio.Future[yarl.URL], found: yarl.URL | BaseException) -> None:
        if isinstance(found, yarl.URL):
            lookup.set_result(found)
            return
        self._lookup = None
        self._on_error(found)
        lookup.cancel()


def _base_url(text: object) -> yarl.URL:
    if isinstance(text, str):
        url = yarl.URL(text.rstrip('/'))
        if url.scheme == 'http' and url.host and url.path in ('', '/'):
            return url
    raise ConfigurationError(
        f'The address of the server is {text!r}: it must be like http://127.0.0.1:8000.'
    )


@functools.lru_cache(maxsize=64)
def _target(base: yarl.URL, target: str) -> yarl.URL:
    return yarl.URL(str(base).rstrip('/') + target, encoded=True)


@functools.lru_cache(maxsize=64)
def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    # aiohttp takes no infinity, and None for no bound.
    return aiohttp.ClientTimeout(total=seconds if math.isfinite(seconds) else None)
