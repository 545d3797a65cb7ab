"""Questions that the runtime asks its children over HTTP on loopback.

Each answers with what was found and never raises for a server that is not there: in a
start, "not yet" is the usual answer. The standard library is enough for a handful of small
requests a second, and needs no event loop.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import urllib.parse
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from apache_beam_vllm_dynamo._addresses import LOOPBACK

PROBE_TIMEOUT_S = 2.0  # a healthy server on loopback answers in milliseconds, a busy one in tenths
CANARY_TIMEOUT_S = 60.0  # the first request may compile kernels
CANARY_PROMPT = 'Hello'

_REQUESTS = re.compile(
    rb'^dynamo_component_requests_total\{[^}]*dynamo_endpoint="generate"[^}]*\} (\S+)', re.MULTILINE
)
_MIGRATIONS = re.compile(rb'^dynamo_frontend_model_migration_total(?:\{.*\})? (\S+)', re.MULTILINE)
# What changes while a rank computes: once a step, or with each piece of a long prompt.
_SIGNS = re.compile(
    rb'^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|prompt_tokens_total'
    rb'|generation_tokens_total)\{[^}]*engine="(\d+)"[^}]*\} (\S+)',
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back.

    Attributes:
      status: The HTTP status, or ``None`` where there was no answer.
      body: The JSON body, or ``None`` where it was none.
      problem: Why there was no answer, or what is wrong with it; else empty.
    """

    status: int | None
    body: Any = None
    problem: str = ''

    def __str__(self) -> str:
        return self.problem or f'HTTP {self.status}'


def etcd_serves(port: int, timeout_s: float = PROBE_TIMEOUT_S) -> Reply | None:
    """``None`` once etcd can serve reads and writes, else what it answered."""
    reply = _get(port, '/health', timeout_s)
    serves = reply.status == HTTPStatus.OK and str(_field(reply.body, 'health')).lower() == 'true'
    return None if serves else reply


def healthy(port: int, timeout_s: float = PROBE_TIMEOUT_S) -> Reply | None:
    """``None`` once the server's own health endpoint says 200, else what it answered."""
    reply = _get(port, '/health', timeout_s)
    return None if reply.status == HTTPStatus.OK else reply


def frontend_serves(
    port: int, model_name: str, namespace: str, engines: int, timeout_s: float = PROBE_TIMEOUT_S
) -> Reply | None:
    """``None`` once the frontend routes to so many engines and has answered a request.

    Listed is not yet routable: for half a second after an engine is listed requests can still
    be answered with an empty 404, hence the request.
    """
    reply = _get(port, _ready_path(model_name), timeout_s)
    if reply.status is None:
        return reply
    found = _workers(reply, namespace)
    if found < engines or not found:
        return Reply(reply.status, problem=f'it routes to {found} of {engines} engines')
    return answers(port, model_name)


def routed_engines(
    port: int, model_name: str, namespace: str, timeout_s: float = PROBE_TIMEOUT_S
) -> int:
    """How many engines the frontend routes to; dead ones count until they are noticed."""
    return _workers(_get(port, _ready_path(model_name), timeout_s), namespace)


def routed_ports(
    port: int, namespace: str, timeout_s: float = PROBE_TIMEOUT_S
) -> frozenset[int] | None:
    """The request ports of the engines that the frontend knows; ``None`` without an answer."""
    reply = _get(port, '/health', timeout_s)
    listed = _field(reply.body, 'instances')
    if reply.status != HTTPStatus.OK or not isinstance(listed, list):
        return None
    found: set[int] = set()
    for instance in listed:
        address = _field(_field(instance, 'transport'), 'tcp')
        ours = _field(instance, 'namespace') == namespace
        if ours and _field(instance, 'endpoint') == 'generate' and isinstance(address, str):
            # HOST:PORT/INSTANCE/NAMESPACE/…
            number = address.partition('/')[0].rpartition(':')[2]
            found.update({int(number)} if number.isdigit() else ())
    return frozenset(found)


def migrations(port: int, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
    """How many requests the frontend has moved to another engine; ``None`` without an answer."""
    return _sum_of(_MIGRATIONS, port, timeout_s)


def requests_of_engine(port: int, timeout_s: float = PROBE_TIMEOUT_S) -> int | None:
    """How many requests an engine has got, on whose system port; ``None`` without an answer."""
    return _sum_of(_REQUESTS, port, timeout_s)


def sum_of(series: re.Pattern[bytes], text: bytes) -> int:
    """The sum over all series of a metric that a pattern finds, each by its value."""
    return round(sum(map(float, series.findall(text))))


def _sum_of(series: re.Pattern[bytes], port: int, timeout_s: float) -> int | None:
    text = _metrics(port, timeout_s)
    return sum_of(series, text) if text is not None else None


def signs_of_ranks(
    port: int, ranks: int, timeout_s: float = PROBE_TIMEOUT_S
) -> list[list[bytes]] | None:
    """What changes while a rank of vLLM's own server computes, for each; ``None`` unanswered."""
    text = _metrics(port, timeout_s)
    if text is None:
        return None
    signs: list[list[bytes]] = [[] for _ in range(ranks)]
    for rank, value in _SIGNS.findall(text):
        if int(rank) < ranks:
            signs[int(rank)].append(value)
    return signs


def answers(
    port: int, model_name: str, timeout_s: float = CANARY_TIMEOUT_S, rank: int | None = None
) -> Reply | None:
    """Asks for one token; ``None`` once it came, else what came instead.

    Args:
      port: Where the server listens.
      model_name: The model.
      timeout_s: How long the answer may take, in seconds.
      rank: The data-parallel rank of vLLM's own server that shall answer; any, if ``None``.
    """
    body = {'model': model_name, 'prompt': CANARY_PROMPT, 'max_tokens': 1}
    headers = {} if rank is None else {'X-data-parallel-rank': str(rank)}
    reply = _exchange('POST', port, '/v1/completions', body, timeout_s, headers)
    return None if reply.status == HTTPStatus.OK else reply


def _metrics(port: int, timeout_s: float) -> bytes | None:
    try:
        status, text = _send('GET', port, '/metrics', None, timeout_s)
    except (OSError, http.client.HTTPException):
        return None
    return text if status == HTTPStatus.OK else None


def _get(port: int, path: str, timeout_s: float) -> Reply:
    return _exchange('GET', port, path, None, timeout_s)


def _ready_path(model_name: str) -> str:
    # The rest of the path is the name, slashes included: an escaped slash is not found, and of
    # a name that begins with one the frontend strips one.
    model = urllib.parse.quote(model_name, safe='/')
    return f'/v1/models/{"/" if model.startswith("/") else ""}{model}/ready'


def _workers(reply: Reply, namespace: str) -> int:
    if reply.status != HTTPStatus.OK or _field(reply.body, 'ready') is not True:
        return 0
    types = _field(_field(_field(reply.body, 'namespaces'), namespace), 'worker_types')
    workers = _field(_field(types, 'aggregated'), 'workers')
    return workers if isinstance(workers, int) else 0


def _exchange(
    method: str,
    port: int,
    path: str,
    body: dict[str, object] | None,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    try:
        status, content = _send(method, port, path, body, timeout_s, headers)
    except (OSError, http.client.HTTPException) as error:
        return Reply(None, problem=f'{type(error).__name__}: {error}')
    try:
        return Reply(status, json.loads(content))
    except ValueError:
        return Reply(status)


def _send(
    method: str,
    port: int,
    path: str,
    body: dict[str, object] | None,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=timeout_s)
    try:
        payload = json.dumps(body).encode() if body is not None else None
        content_type = {'Content-Type': 'application/json'} if body is not None else {}
        connection.request(method, path, payload, content_type | dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None
