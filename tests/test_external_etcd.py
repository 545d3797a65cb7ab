"""An etcd of others serves only if it says so in time, whatever connections it takes."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from apache_beam_vllm_dynamo import StartError, _external_etcd
from apache_beam_vllm_dynamo._addresses import free_ports
from apache_beam_vllm_dynamo._external_etcd import LOOK_INTERVAL_S, ExternalEtcd

WELL = (200, b'{"health":"true"}')


@contextlib.contextmanager
def etcd(status: int, body: bytes) -> Iterator[str]:
    """Answers all questions so; gives its endpoint."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == '/health'
            self.send_response(status)
            self.send_header('Content-Length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f'http://127.0.0.1:{server.server_address[1]}'
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of one that takes connections and answers nothing."""
    monkeypatch.setattr(_external_etcd, 'READ_TIMEOUT_S', 0.1)
    with socket.create_server(('127.0.0.1', 0)) as listener:
        yield f'127.0.0.1:{listener.getsockname()[1]}'


def test_one_that_says_so_serves_and_one_such_endpoint_is_enough(stopped: str) -> None:
    with etcd(*WELL) as well:
        assert ExternalEtcd(well).serves
        assert ExternalEtcd(well.removeprefix('http://')).serves
        assert ExternalEtcd(f'{stopped}, {well},').serves


@pytest.mark.parametrize(
    ('answer', 'says'),
    [
        ((503, b'{"health":"false","reason":"RAFT NO LEADER"}'), 'HTTP 503, RAFT NO LEADER'),
        ((200, b'{"health":"false"}'), 'HTTP 200'),
        ((200, b'<html>'), 'HTTP 200'),
        ((401, b''), 'HTTP 401'),
    ],
    ids=['no quorum', 'unhealthy', 'no etcd', 'refused'],
)
def test_one_that_answers_otherwise_does_not_serve(answer: tuple[int, bytes], says: str) -> None:
    with etcd(*answer) as unwell:
        assert not ExternalEtcd(unwell).serves
        assert says in ExternalEtcd(unwell).problem()


def test_where_a_proxy_hides_its_health_it_is_taken_to_serve() -> None:
    with etcd(404, b'') as hidden:
        assert ExternalEtcd(hidden).serves


def test_one_that_takes_connections_and_is_silent_does_not_serve(stopped: str) -> None:
    assert 'timed out' in ExternalEtcd(stopped).problem()


@pytest.mark.parametrize('endpoints', ['', ',', 'http://127.0.0.1:99999', 'https://127.0.0.1:1'])
def test_an_address_that_cannot_be_asked_is_a_problem_and_no_crash(endpoints: str) -> None:
    assert ExternalEtcd(endpoints).problem()


def test_certificates_that_cannot_be_read_are_a_problem_and_no_crash() -> None:
    env = {'ETCD_AUTH_CA': '/nonexistent.pem'}
    assert 'FileNotFoundError' in ExternalEtcd('https://127.0.0.1:1', env).problem()


def test_a_start_without_it_is_refused_with_each_endpoint_and_the_mend(
    stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_external_etcd, 'START_BOUND_S', 0.5)
    away = f'127.0.0.1:{free_ports(1)[0]}'
    with pytest.raises(StartError) as raised:
        ExternalEtcd(f'{stopped},{away}').await_serving(time.monotonic() + 60)
    for part in (stopped, away, 'timed out', 'ConnectionRefusedError', 'unset', "discovery='file'"):
        assert part in str(raised.value)


def test_a_start_waits_for_one_that_starts_too() -> None:
    [port] = free_ports(1)
    waiting = ExternalEtcd(f'http://127.0.0.1:{port}')
    failures: list[StartError] = []

    def wait() -> None:
        try:
            waiting.await_serving(time.monotonic() + 60)
        except StartError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    with socket.create_server(('127.0.0.1', port)) as listener:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n' + WELL[1])
        thread.join()
    assert failures == []


def test_it_is_asked_again_only_after_a_while() -> None:
    now = 1000.0
    with etcd(*WELL) as url:
        watched = ExternalEtcd(url, clock=lambda: now)
        assert watched.serves
    assert watched.serves
    now += LOOK_INTERVAL_S
    assert not watched.serves
