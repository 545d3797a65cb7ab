"""A little OpenAI server that misbehaves on demand, for tests of the request path.

A request says by marks in its prompt what shall happen to it, e.g. ``'[status=503,2] hello'``:
the first two times that this prompt comes it is answered 503, then well. Marks:

* ``[status=CODE]``, ``[status=CODE,TIMES]``: answers with the status and Dynamo's body for it.
* ``[empty404=TIMES]``: answers 404 with an empty body.
* ``[retry_after=VALUE]``: with a status: the header ``Retry-After``.
* ``[body=NAME]``: answers with one of :data:`BODIES`.
* ``[hang]``, ``[hang=TIMES]``: never answers.
* ``[cut]``, ``[cut=TIMES]``: closes the connection without an answer.
* ``[half=TIMES]``: closes it in the middle of the answer.
* ``[crash=TIMES]``: cuts every connection of the server, as an engine does that dies.
* ``[sleep=SECONDS]``: answers, or does the above, that much later.
"""

from __future__ import annotations

import asyncio
import collections
import json
import re
import threading
from typing import Any, Self

from aiohttp import web

_MARK = re.compile(r'\[(\w+)(?:=([^\]]*))?\]')
_STOP_TIMEOUT_S = 10

DYNAMO_TOO_LONG = {
    'message': 'Invalid request',
    'type': 'Bad Request',
    'code': 400,
    'details': {'type': 'context_length', 'limit': 2048, 'actual': 2349},
}
VLLM_TOO_LONG = {
    'error': {
        'message': "This model's maximum context length is 2048 tokens. However, you requested "
        '16 output tokens and your prompt contains at least 2033 input tokens, for a total of at '
        'least 2049 tokens. Please reduce the length of the input prompt.',
        'type': 'BadRequestError',
        'param': 'input_tokens',
        'code': 400,
    }
}
BODIES: dict[str, tuple[int, str]] = {
    'dynamo_too_long': (400, json.dumps(DYNAMO_TOO_LONG)),
    'vllm_too_long': (400, json.dumps(VLLM_TOO_LONG)),
    'broken_json': (200, '{"id": "cmpl-1", "choices": [{"te'),
    'wrong_shape': (200, '{"id": "cmpl-1", "answer": 42}'),
    'no_choices': (200, '{"id": "1", "object": "text_completion", "choices": []}'),
    'list': (200, '[]'),
    'odd_usage': (200, '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "many"}}'),
    'odd_reason': (200, '{"choices": [{"text": "a", "finish_reason": {"why": "length"}}]}'),
    'bare': (200, '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3}}'),
}


class FakeServer:
    """Runs the server in a thread of its own, as a context manager.

    Attributes:
      port: Where it listens on 127.0.0.1.
      prompts: What came, in order of arrival.
      bodies: The JSON bodies that came.
      headers: The headers that came.
      queries: The query strings that came.
      connections: How many connections brought a request.
      in_flight: How many requests are being answered.
      most_in_flight: The most there ever were at once.
      cancelled: How many requests were given up by the client.
    """

    def __init__(self, port: int = 0, latency_s: float = 0.0) -> None:
        self.port = port
        self.latency_s = latency_s
        self.prompts: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.queries: list[dict[str, str]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.cancelled = 0
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        # Kept after their end as well, so that none is counted twice.
        self._transports: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._stopping: asyncio.Event | None = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name='fake-server')

    @property
    def connections(self) -> int:
        return len(self._transports)

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.port}'

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the server listens."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Cuts every connection and frees the port."""
        if self._thread.is_alive():
            assert self._stopping is not None
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001  # raised by the thread that waits
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        application = web.Application(client_max_size=1 << 26)
        application.router.add_get('/health', self._health)
        application.router.add_post('/v1/completions', self._answer)
        application.router.add_post('/v1/chat/completions', self._answer)
        # The handler of a request whose client went away is cancelled, and so can be counted.
        runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=0.01, access_log=None
        )
        await runner.setup()
        site = web.TCPSite(runner, '127.0.0.1', self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stopping.wait()
        await site.stop()
        self._cut_all()
        await runner.cleanup()

    def _cut_all(self) -> None:
        for transport in self._transports:
            transport.abort()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get('prompt', body.get('messages'))
        if not isinstance(prompt, str):
            prompt = json.dumps(prompt)
        assert request.transport is not None
        self._transports.add(request.transport)
        self.prompts.append(prompt)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.queries.append(dict(request.query))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._misbehave(request, body, prompt)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _misbehave(
        self, request: web.Request, body: dict[str, Any], prompt: str
    ) -> web.StreamResponse:
        marks = {name: value or '' for name, value in _MARK.findall(prompt)}
        await asyncio.sleep(float(marks.get('sleep') or self.latency_s))
        if self._due(marks, 'hang', prompt):
            await asyncio.Event().wait()
        if self._due(marks, 'cut', prompt):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self._due(marks, 'crash', prompt):
            self._cut_all()
            return web.Response()
        if self._due(marks, 'half', prompt):
            response = web.StreamResponse(headers={'Content-Length': '500'})
            await response.prepare(request)
            await response.write(b'{"id": ')
            assert request.transport is not None
            request.transport.close()
            return response
        if self._due(marks, 'empty404', prompt):
            return web.Response(status=404)
        if 'body' in marks and self._due(marks, 'body', prompt):
            status, text = BODIES[marks['body'].split(',')[0]]
            return web.Response(status=status, text=text, content_type='application/json')
        if self._due(marks, 'status', prompt):
            status = int(marks['status'].split(',')[0])
            headers = {'Retry-After': marks['retry_after']} if 'retry_after' in marks else None
            said = {'message': f'said for {prompt}', 'type': 'Said', 'code': status}
            return web.json_response(said, status=status, headers=headers)
        return web.json_response(answer(body))

    def _due(self, marks: dict[str, str], name: str, prompt: str) -> bool:
        """Whether a mark still applies; one without a number of times always does."""
        if name not in marks:
            return False
        value = marks[name]
        times = value.partition(',')[2] if name in ('status', 'body') else value
        self._counts[name, prompt] += 1
        return not times or self._counts[name, prompt] <= int(times)


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """What a well-behaved server answers: the prompt, in capitals."""
    common = {'id': 'answer-1', 'created': 1, 'model': body['model']}
    usage = {
        'prompt_tokens': 5,
        'completion_tokens': 2,
        'total_tokens': 7,
        'prompt_tokens_details': {'cached_tokens': 4},
    }
    if 'messages' in body:
        content = str(body['messages'][-1]['content']).upper()
        message = {'role': 'assistant', 'content': content}
        choice = {'index': 0, 'message': message, 'finish_reason': 'stop', 'logprobs': None}
        kind = 'chat.completion'
    else:
        text = str(body['prompt']).upper()
        choice = {'index': 0, 'text': text, 'finish_reason': 'stop', 'logprobs': None}
        kind = 'text_completion'
    return {**common, 'object': kind, 'choices': [choice], 'usage': usage, 'nvext': {'worker': 1}}
