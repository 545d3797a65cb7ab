"""What the probes conclude from what servers answer, or do not answer."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apache_beam_vllm_dynamo import _probes
from apache_beam_vllm_dynamo._addresses import free_ports
from apache_beam_vllm_dynamo._probes import (
    Reply,
    answers,
    etcd_serves,
    frontend_serves,
    healthy,
    signs_of_ranks,
)

NAMESPACE = 'beam-0'


@dataclasses.dataclass
class FakeServer:
    """Answers what it is told to, and notes what it was asked."""

    port: int
    answers: dict[str, tuple[int, bytes]] = dataclasses.field(default_factory=dict)
    asked: list[tuple[str, str, bytes]] = dataclasses.field(default_factory=list)

    def set(self, path: str, status: int, body: Any = None) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers[path] = (status, raw)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
            fake.asked.append((self.command, self.path, body))
            status, raw = fake.answers.get(urllib.parse.unquote(self.path), (404, b''))
            self.send_response(status)
            self.send_header('Content-Length', str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_POST = do_GET  # noqa: N815 - the name is http.server's

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as httpd:
        fake = FakeServer(httpd.server_address[1])
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            httpd.shutdown()
            thread.join()


def ready(workers: object, namespace: str = NAMESPACE, *, is_ready: object = True) -> Any:
    types = {'aggregated': {'workers': workers}}
    return {'ready': is_ready, 'namespaces': {namespace: {'worker_types': types}}}


@pytest.mark.parametrize('body', [{'health': 'true'}, {'health': True, 'reason': ''}], ids=str)
def test_etcd_serves_once_it_says_so(server: FakeServer, body: Any) -> None:
    server.set('/health', 200, body)
    assert etcd_serves(server.port) is None


@pytest.mark.parametrize(
    ('status', 'body'),
    [
        (503, {'health': 'true'}),
        (200, {'health': 'false', 'reason': 'NOSPACE'}),
        (200, {}),
        (200, ['true']),
        (200, b'<html>'),
        (200, b''),
        (200, b'\xff\xfe'),
    ],
    ids=str,
)
def test_an_etcd_that_answers_but_is_not_healthy_does_not_serve(
    server: FakeServer, status: int, body: Any
) -> None:
    server.set('/health', status, body)
    found = etcd_serves(server.port)
    assert found is not None
    assert found.status == status


@pytest.mark.parametrize('status', [404, 500, 503])
def test_an_engine_is_healthy_once_its_status_is_200_whatever_it_says(
    server: FakeServer, status: int
) -> None:
    server.set('/health', 200, b'')
    assert healthy(server.port) is None
    server.set('/health', status, {'status': 'notready'})
    found = healthy(server.port)
    assert found is not None
    assert (found.status, str(found)) == (status, f'HTTP {status}')
    assert found.body == {'status': 'notready'}


Probe = Callable[[int, float], Reply | None]
PROBES: dict[str, Probe] = {
    'etcd': etcd_serves,
    'engine': healthy,
    'frontend': lambda port, timeout_s: frontend_serves(port, 'm', NAMESPACE, 1, timeout_s),
}


@pytest.mark.parametrize('probe', PROBES.values(), ids=PROBES.keys())
def test_a_server_that_is_not_there_is_no_error(probe: Probe) -> None:
    port = free_ports(1)[0]
    found = probe(port, 1.0)
    assert found is not None
    assert found.status is None
    assert 'ConnectionRefusedError' in str(found)


@contextlib.contextmanager
def raw_server(reply: bytes | None) -> Iterator[int]:
    """Accepts one connection and sends ``reply``, or keeps silent."""
    over = threading.Event()
    with socket.create_server(('127.0.0.1', 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(65_536)
                if reply is None:
                    over.wait(timeout=60)
                else:
                    connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize('probe', PROBES.values(), ids=PROBES.keys())
def test_a_server_that_keeps_silent_is_given_up_in_time(probe: Probe) -> None:
    start = time.monotonic()
    with raw_server(None) as port:
        found = probe(port, 0.1)
        waited_s = time.monotonic() - start
    assert found is not None
    assert found.status is None
    assert 'timed out' in str(found)
    assert waited_s < 5


@pytest.mark.parametrize('probe', PROBES.values(), ids=PROBES.keys())
@pytest.mark.parametrize(
    'reply',
    [
        b'',
        b'nonsense\r\n\r\n',
        b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort',
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n',
    ],
    ids=['hangs up', 'no HTTP', 'cut off', 'bad chunk'],
)
def test_a_broken_answer_is_no_answer(probe: Probe, reply: bytes) -> None:
    with raw_server(reply) as port:
        found = probe(port, 2.0)
    assert found is not None
    assert found.status is None
    assert str(found)


def test_the_frontend_serves_once_all_are_routable_and_a_request_was_answered(
    server: FakeServer,
) -> None:
    server.set('/v1/models/org/model/ready', 200, ready(2))
    server.set('/v1/completions', 200, {'choices': []})
    assert frontend_serves(server.port, 'org/model', NAMESPACE, 2) is None
    method, path, body = server.asked[-1]
    assert (method, path) == ('POST', '/v1/completions')
    assert json.loads(body) == {'model': 'org/model', 'prompt': 'Hello', 'max_tokens': 1}


def test_more_engines_than_are_expected_serve_too(server: FakeServer) -> None:
    """A dead one is counted until its lease ends."""
    server.set('/v1/models/m/ready', 200, ready(3))
    server.set('/v1/completions', 200, {})
    assert frontend_serves(server.port, 'm', NAMESPACE, 2) is None


@pytest.mark.parametrize(
    ('status', 'body', 'found'),
    [
        (404, b'', 0),
        (200, ready(1), 1),
        (200, ready(0), 0),
        (200, ready(2, is_ready=False), 0),
        (200, ready(2, is_ready='yes'), 0),
        (200, ready(2, namespace='of another worker'), 0),
        (200, ready('2'), 0),
        (200, {'ready': True}, 0),
        (200, {'ready': True, 'namespaces': {NAMESPACE: None}}, 0),
        (200, b'<html>', 0),
        (503, ready(2), 0),
    ],
    ids=str,
)
def test_a_frontend_that_routes_to_too_few_is_asked_nothing_more(
    server: FakeServer, status: int, body: Any, found: int
) -> None:
    server.set('/v1/models/m/ready', status, body)
    server.set('/v1/completions', 200, {})
    reply = frontend_serves(server.port, 'm', NAMESPACE, 2)
    assert reply is not None
    assert str(reply) == f'it routes to {found} of 2 engines'
    assert reply.status == status
    assert [path for _, path, _ in server.asked] == ['/v1/models/m/ready']


def test_no_engine_at_all_is_not_enough_even_where_none_is_expected(server: FakeServer) -> None:
    server.set('/v1/models/m/ready', 200, ready(0))
    server.set('/v1/completions', 200, {})
    assert frontend_serves(server.port, 'm', NAMESPACE, 0) is not None


@pytest.mark.parametrize('status', [404, 503, 529])
def test_listed_is_not_yet_routable(server: FakeServer, status: int) -> None:
    server.set('/v1/models/m/ready', 200, ready(1))
    server.set('/v1/completions', status, b'')
    found = frontend_serves(server.port, 'm', NAMESPACE, 1)
    assert found is not None
    assert str(found) == f'HTTP {status}'


def test_the_canary_says_what_came_instead_of_an_answer(server: FakeServer) -> None:
    server.set('/v1/completions', 400, {'message': 'no'})
    found = answers(server.port, 'm')
    assert found is not None
    assert (found.status, found.body) == (400, {'message': 'no'})


def test_the_signs_of_a_rank_are_its_own(server: FakeServer) -> None:
    def metrics(first: float, second: float) -> bytes:
        return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {first}
vllm:generation_tokens_total{{engine="1",model_name="m"}} {second}
http_requests_total{{engine="1"}} {time.monotonic()}
""".encode()

    server.set('/metrics', 200, metrics(1, 1))
    before = signs_of_ranks(server.port, 2)
    assert before == signs_of_ranks(server.port, 2)
    server.set('/metrics', 200, metrics(1, 2))
    after = signs_of_ranks(server.port, 2)
    assert before is not None
    assert after is not None
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    server.set('/metrics', 404, b'')
    assert signs_of_ranks(server.port, 2) is None


@pytest.mark.parametrize(
    ('model', 'path'),
    [
        ('m', '/v1/models/m/ready'),
        ('org/model', '/v1/models/org/model/ready'),
        ('/models/own', '/v1/models///models/own/ready'),
        ('a b?c#d', '/v1/models/a%20b%3Fc%23d/ready'),
        ('modèle', '/v1/models/mod%C3%A8le/ready'),
    ],
)
def test_the_name_of_the_model_is_the_rest_of_the_path(
    server: FakeServer, model: str, path: str
) -> None:
    frontend_serves(server.port, model, NAMESPACE, 1)
    assert server.asked[0][:2] == ('GET', path)


def test_a_canary_is_given_longer_than_a_look() -> None:
    """The first request may compile kernels."""
    assert _probes.CANARY_TIMEOUT_S > 10 * _probes.PROBE_TIMEOUT_S
