"""Requests that wait are sent so that those which begin alike follow each other."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from apache_beam_vllm_dynamo import _dispatcher
from apache_beam_vllm_dynamo._client import InferenceClient, RequestStream
from tests.client.calls import BUILDER, QUICK, build, text_of, texts
from tests.fake_server import FakeServer
from tests.support.processes import wait_until

LONG = 'a document that is long enough to be worth a wait ' * 40


@pytest.fixture
def ordering(server: FakeServer) -> Iterator[InferenceClient]:
    """A client that sends one request at a time, in the order of prefixes."""
    with InferenceClient(lambda: server.url, 1, QUICK, open_prefixes=1) as client:
        yield client


def shuffled(families: int, siblings: int) -> list[str]:
    prompts = [f'{LONG} {f}: question {s}' for f in range(families) for s in range(siblings)]
    random.Random(0).shuffle(prompts)
    return prompts


def changes(prompts: Sequence[str]) -> int:
    """How often a prompt is of another family than the one before."""
    families = [prompt.removeprefix(LONG).split(':')[0] for prompt in prompts]
    return sum(one != other for one, other in itertools.pairwise(families))


def put_all(stream: RequestStream[int], prompts: Sequence[str]) -> None:
    for number, prompt in enumerate(prompts):
        stream.put(BUILDER.build(prompt), number)


def test_a_batch_is_sent_in_order_and_its_results_are_not(
    ordering: InferenceClient, server: FakeServer
) -> None:
    prompts = shuffled(10, 6)
    outcomes = ordering.run(build(*prompts))
    assert changes(prompts) > 40
    assert changes(server.prompts) == 9
    assert texts(outcomes) == [prompt.upper() for prompt in prompts]


def test_without_an_order_requests_are_sent_as_they_come(server: FakeServer) -> None:
    prompts = shuffled(4, 4)
    with InferenceClient(lambda: server.url, 1, QUICK) as client:
        client.run(build(*prompts))
    assert server.prompts == prompts


def test_a_bundle_is_gathered_before_its_first_request_is_sent(
    ordering: InferenceClient, server: FakeServer
) -> None:
    prompts = shuffled(10, 6)
    with ordering.stream(100) as stream:
        put_all(stream, prompts)
        done = {token: text_of(outcome) for token, outcome in stream.drain()}
    assert changes(server.prompts) == 9
    assert done == {number: prompt.upper() for number, prompt in enumerate(prompts)}


def test_the_end_of_a_bundle_ends_the_gathering(
    ordering: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatcher, 'GATHER_PAUSE_S', 10.0)
    monkeypatch.setattr(_dispatcher, 'GATHER_S', 10.0)
    began = time.monotonic()
    with ordering.stream(100) as stream:
        put_all(stream, shuffled(2, 2))
        assert len(list(stream.drain())) == 4
    assert time.monotonic() - began < 5


def test_what_a_slow_source_gives_is_sent_after_a_pause(
    ordering: InferenceClient, server: FakeServer
) -> None:
    with ordering.stream(100) as stream:
        put_all(stream, shuffled(2, 2))
        wait_until('they are sent without the end of the bundle', lambda: len(server.prompts) == 4)
        assert len(list(stream.drain())) == 4


def test_gathering_ends_although_ever_more_comes(
    ordering: InferenceClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatcher, 'GATHER_S', 0.2)
    with ordering.stream(10_000) as stream:
        began = time.monotonic()
        for number in itertools.count():
            stream.put(BUILDER.build(f'{LONG} {number}'), number)
            if server.prompts or time.monotonic() - began > 10:
                break
            time.sleep(0.005)
        assert server.prompts
        assert sum(1 for _ in stream.drain()) == number + 1


def test_nothing_is_gathered_of_short_prompts(
    ordering: InferenceClient, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dispatcher, 'GATHER_PAUSE_S', math.inf)
    with ordering.stream(100) as stream:
        stream.put(BUILDER.build('short'), 0)
        wait_until('it is sent at once', lambda: server.prompts == ['short'])
        assert len(list(stream.drain())) == 1


def test_a_stream_holds_its_caller_when_too_much_waits(server: FakeServer) -> None:
    """By the bytes of what waits; what is in flight does not count."""
    body = len(BUILDER.build('[sleep=0.2] 0').body)  # type: ignore[union-attr]  # it is one
    with (
        InferenceClient(lambda: server.url, 4, QUICK, open_prefixes=1) as client,
        client.stream(100, max_waiting_bytes=1.5 * body) as stream,
    ):
        began = time.monotonic()
        for number in range(4):
            stream.put(BUILDER.build(f'[sleep=0.2] {number}'), number)
        wait_until('the window is full', lambda: server.in_flight == 4)
        for number in range(4, 8):
            stream.put(BUILDER.build(f'[sleep=0.2] {number}'), number)
            time.sleep(0.02)  # so that the loop has counted it
        assert time.monotonic() - began > 0.2
        assert len(list(stream.drain())) == 8
    assert server.most_in_flight == 4


def test_cancelled_requests_are_forgotten_while_they_are_gathered(
    ordering: InferenceClient, server: FakeServer
) -> None:
    with ordering.stream(100) as stream:
        put_all(stream, shuffled(2, 2))
    with ordering.stream(100) as stream:
        put_all(stream, ['another'])
        assert len(list(stream.drain())) == 1
    assert server.prompts[-1] == 'another'
    assert len(server.prompts) <= 2  # one may have been on its way
