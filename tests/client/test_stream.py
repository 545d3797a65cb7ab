"""Requests that come one by one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo._responses import Outcome
from apache_beam_vllm_dynamo.errors import (
    ConfigurationError,
    ErrorKind,
    RuntimeFailedError,
)
from tests.client.calls import (
    BUILDER,
    QUICK,
    WINDOW,
    text_of,
)
from tests.fake_server import FakeServer
from tests.support.processes import wait_until

# Streams.


def test_a_stream_gives_outcomes_when_they_are_done(
    client: InferenceClient, server: FakeServer
) -> None:
    with client.stream(4) as stream:
        stream.put(BUILDER.build('[hang=1] slow'), 'slow')
        stream.put(BUILDER.build('quick'), 'quick')
        stream.put(BUILDER.build(''), 'bad')
        got = dict(wait_until('two are done', lambda: list(take(stream, 2))))
        assert {token: text_of(outcome) for token, outcome in got.items()} == {
            'quick': 'QUICK',
            'bad': ErrorKind.INVALID_REQUEST,
        }
        assert stream.pending == 1
    wait_until('closing cancels the rest', lambda: server.in_flight == 0)


def take(stream: Any, count: int) -> Iterator[tuple[object, Outcome]]:
    """Takes so many outcomes without ever waiting inside the stream."""
    found = 0
    while found < count:
        for item in itertools.islice(stream.ready(), count - found):
            found += 1
            yield item
        time.sleep(0.001)


def test_a_stream_keeps_the_window_full_and_loses_nothing(
    client: InferenceClient, server: FakeServer
) -> None:
    server.latency_s = 0.003
    done: dict[object, str | ErrorKind] = {}
    with client.stream(2 * WINDOW) as stream:
        for n in range(200):
            stream.put(BUILDER.build(f'{n}'), n)
            done.update((token, text_of(outcome)) for token, outcome in stream.ready())
            assert stream.pending <= 200
        done.update((token, text_of(outcome)) for token, outcome in stream.drain())
    assert done == {n: f'{n}' for n in range(200)}
    assert server.most_in_flight == WINDOW


def test_a_stream_holds_its_caller_when_too_many_are_open(
    client: InferenceClient, server: FakeServer
) -> None:
    with client.stream(2) as stream:
        for n in range(2):
            stream.put(BUILDER.build(f'[sleep=0.2] {n}'), n)
        began = time.monotonic()
        stream.put(BUILDER.build('three'), 2)
        assert time.monotonic() - began > 0.1
        assert [token for token, _ in stream.drain()][-1] == 2
    assert server.most_in_flight == 2


def test_a_stream_raises_what_ended_its_requests(server: FakeServer) -> None:
    def endpoint() -> str:
        raise RuntimeFailedError('gone')

    with InferenceClient(endpoint, WINDOW, QUICK) as client:
        with client.stream(2) as stream:
            stream.put(BUILDER.build('one'), 1)
            with pytest.raises(RuntimeFailedError, match='gone'):
                list(stream.drain())
        with client.stream(1) as stream:
            stream.put(BUILDER.build('one'), 1)
            with pytest.raises(RuntimeFailedError, match='gone'):
                stream.put(BUILDER.build('one'), 2)
    assert server.connections == 0


def test_a_stream_needs_room_for_one(client: InferenceClient) -> None:
    with pytest.raises(ConfigurationError, match='max_pending'):
        client.stream(0)
