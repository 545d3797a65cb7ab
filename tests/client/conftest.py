"""A client, a server that misbehaves on demand, and a look at what stays behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from apache_beam_vllm_dynamo import _client, _retry
from apache_beam_vllm_dynamo._client import InferenceClient
from tests.client.calls import (
    QUICK,
    WINDOW,
    sockets,
)
from tests.fake_server import FakeServer
from tests.support.processes import wait_until


@pytest.fixture(autouse=True)
def _quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retry, 'FIRST_BACKOFF_S', 0.01)
    monkeypatch.setattr(_retry, 'MAX_BACKOFF_S', 0.05)
    monkeypatch.setattr(_client, '_LIVENESS_CHECK_S', 0.05)


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    """After a test that closed its clients there is no thread and no socket of theirs."""
    threads, descriptors = set(threading.enumerate()), sockets()
    yield
    wait_until('the threads end', lambda: set(threading.enumerate()) <= threads)
    wait_until('the sockets close', lambda: len(sockets()) <= len(descriptors))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def client(server: FakeServer) -> Iterator[InferenceClient]:
    with InferenceClient(lambda: server.url, WINDOW, QUICK) as client:
        yield client
