"""Every element has an outcome of its own, after retries that fit and within its deadlines."""

from __future__ import annotations

import time

import pytest
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion
from openai.types.completion_usage import PromptTokensDetails

from apache_beam_vllm_dynamo import _retry
from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo._requests import Endpoint, RequestBuilder
from apache_beam_vllm_dynamo._responses import Answer
from apache_beam_vllm_dynamo._retry import CROWD, RequestLimits, RetryReason
from apache_beam_vllm_dynamo.errors import (
    ErrorKind,
)
from apache_beam_vllm_dynamo.messages import CompletionRequest, OpenAIChatMessage
from tests.client.calls import (
    BUILDER,
    WINDOW,
    build,
    failure,
    text_of,
    texts,
)
from tests.fake_server import FakeServer
from tests.support.processes import wait_until

# Answers.


def test_answers_come_in_order_as_openai_objects(client: InferenceClient) -> None:
    first, second = client.run(build('one', 'two'))
    assert texts([first, second]) == ['ONE', 'TWO']
    assert isinstance(first, Answer)
    assert isinstance(first.response, Completion)
    assert isinstance(first.response.choices[0], CompletionChoice)
    assert isinstance(first.response.usage, CompletionUsage)
    assert isinstance(first.response.usage.prompt_tokens_details, PromptTokensDetails)
    assert first.response.usage.prompt_tokens_details.cached_tokens == 4


def test_fields_that_openai_does_not_know_are_kept(client: InferenceClient) -> None:
    (outcome,) = client.run(build('one'))
    assert isinstance(outcome, Answer)
    assert outcome.response.to_dict()['nvext'] == {'worker': 1}


def test_chat_gives_chat_completions(client: InferenceClient) -> None:
    builder = RequestBuilder('model', Endpoint.CHAT)
    (outcome,) = client.run([builder.build([OpenAIChatMessage('user', 'hello')])])
    assert isinstance(outcome, Answer)
    assert isinstance(outcome.response, ChatCompletion)
    assert outcome.response.choices[0].message.content == 'HELLO'


def test_an_outcome_says_when_and_how_long(client: InferenceClient) -> None:
    before = time.time() * 1000
    (outcome,) = client.run(build('[sleep=0.1] one'))
    assert isinstance(outcome, Answer)
    assert 0.1 <= outcome.latency_s < 5
    assert 0 <= outcome.queue_s < 5
    assert (outcome.attempts, outcome.retried) == (1, ())
    assert before + 99 <= outcome.completed_at_ms <= time.time() * 1000


def test_headers_and_query_of_the_arguments_reach_the_server(
    server: FakeServer, client: InferenceClient
) -> None:
    arguments = {'extra_headers': {'X-Who': 'me'}, 'extra_query': {'q': 'a b'}}
    client.run(build(CompletionRequest('one', arguments)))
    assert server.headers[0]['X-Who'] == 'me'
    assert server.headers[0]['Content-Type'] == 'application/json'
    assert server.queries == [{'q': 'a b'}]


def test_an_empty_batch_sends_nothing(client: InferenceClient, server: FakeServer) -> None:
    assert client.run([]) == []
    assert server.connections == 0


# Each element has its own outcome.


def test_bad_elements_leave_their_neighbours_alone(
    client: InferenceClient, server: FakeServer
) -> None:
    outcomes = client.run(
        build(
            'one',
            '[status=400] bad',
            'two',
            '',
            '[body=dynamo_too_long]',
            '[body=broken_json]',
            '[status=500] poison',
            'three',
        )
    )
    assert texts(outcomes) == [
        'ONE',
        ErrorKind.INVALID_REQUEST,
        'TWO',
        ErrorKind.INVALID_REQUEST,
        ErrorKind.PROMPT_TOO_LONG,
        ErrorKind.MALFORMED_RESPONSE,
        ErrorKind.ENGINE_DIED,
        'THREE',
    ]
    assert server.prompts.count('one') == 1


@pytest.mark.parametrize('status', [400, 401, 404, 413, 422, 501])
def test_a_refused_request_is_sent_once(
    client: InferenceClient, server: FakeServer, status: int
) -> None:
    (outcome,) = client.run(build(f'[status={status}] one'))
    error = failure(outcome)
    assert (error.kind, error.status, error.attempts) == (ErrorKind.INVALID_REQUEST, status, 1)
    assert len(server.prompts) == 1


@pytest.mark.parametrize(
    ('body', 'lengths'),
    [
        ('dynamo_too_long', {'limit': 2048, 'actual': 2349}),
        ('vllm_too_long', {'limit': 2048, 'actual': 2033}),
    ],
)
def test_a_prompt_that_is_too_long_is_told_with_its_lengths(
    client: InferenceClient, body: str, lengths: dict[str, int]
) -> None:
    error = failure(client.run(build(f'[body={body}]'))[0])
    assert (error.kind, error.status, error.details) == (ErrorKind.PROMPT_TOO_LONG, 400, lengths)


def test_an_element_that_was_never_sent_says_so(client: InferenceClient) -> None:
    (outcome,) = client.run(build(None))
    assert failure(outcome).attempts == 0
    assert 'not sent' in str(failure(outcome))


# What passes is waited out.

PASSING = [
    ('[status=429,2]', RetryReason.OVERLOADED),
    ('[status=529,2]', RetryReason.OVERLOADED),
    ('[status=503,2]', RetryReason.UNAVAILABLE),
    ('[empty404=2]', RetryReason.NOT_ROUTED),
    ('[status=500,2]', RetryReason.SERVER_ERROR),
    ('[status=504,2]', RetryReason.TIMEOUT),
    ('[body=broken_json,2]', RetryReason.MALFORMED),
    ('[body=wrong_shape,2]', RetryReason.MALFORMED),
    ('[body=no_choices,2]', RetryReason.MALFORMED),
    ('[body=list,2]', RetryReason.MALFORMED),
    ('[body=odd_usage,2]', RetryReason.MALFORMED),
    ('[body=odd_reason,2]', RetryReason.MALFORMED),
    ('[cut=2]', RetryReason.DISCONNECT),
    ('[half=2]', RetryReason.DISCONNECT),
]


@pytest.mark.parametrize(('mark', 'reason'), PASSING)
def test_what_passes_is_sent_again_and_told(
    client: InferenceClient, server: FakeServer, mark: str, reason: RetryReason
) -> None:
    outcomes = client.run(build(f'{mark} a', 'b'))
    assert texts(outcomes) == [f'{mark} A'.upper(), 'B']
    assert isinstance(outcomes[0], Answer)
    assert (outcomes[0].attempts, outcomes[0].retried) == (3, (reason, reason))
    assert len(server.prompts) == 4


def test_overload_does_not_count_as_retries_of_an_element(server: FakeServer) -> None:
    """KV-aware routing may refuse a burst of siblings often: that fails nothing."""
    limits = RequestLimits(max_wait_s=20.0, max_retries=0)
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        (outcome,) = client.run(build('[status=529,9] one'))
    assert isinstance(outcome, Answer)
    assert outcome.attempts == 10


@pytest.mark.parametrize(
    ('mark', 'kind', 'status'),
    [
        ('[status=529]', ErrorKind.OVERLOADED, 529),
        ('[status=503]', ErrorKind.UNAVAILABLE, 503),
        ('[empty404]', ErrorKind.UNAVAILABLE, 404),
    ],
)
def test_waiting_ends_with_the_total_time(
    server: FakeServer, mark: str, kind: ErrorKind, status: int
) -> None:
    limits = RequestLimits(max_wait_s=0.3)
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        began = time.monotonic()
        bad, good = client.run(build(f'{mark} one', 'two'))
        took = time.monotonic() - began
    error = failure(bad)
    assert (error.kind, error.status) == (kind, status)
    assert error.attempts > 2
    assert 0.3 <= took < 5
    assert text_of(good) == 'TWO'


def test_retry_after_is_honoured(client: InferenceClient) -> None:
    (outcome,) = client.run(build('[status=503,1] [retry_after=0.4] one'))
    began = time.monotonic()
    (outcome,) = client.run(build('[status=429,1] [retry_after=0.4] one'))
    assert 0.4 <= time.monotonic() - began < 5
    assert isinstance(outcome, Answer)
    assert outcome.attempts == 2


@pytest.mark.parametrize(
    ('mark', 'kind', 'status'),
    [
        ('[status=500]', ErrorKind.ENGINE_DIED, 500),
        ('[cut]', ErrorKind.ENGINE_DIED, None),
        ('[half]', ErrorKind.ENGINE_DIED, None),
        ('[body=broken_json]', ErrorKind.MALFORMED_RESPONSE, 200),
    ],
)
def test_failures_of_an_element_of_its_own_end_with_their_count(
    client: InferenceClient, server: FakeServer, mark: str, kind: ErrorKind, status: int | None
) -> None:
    error = failure(client.run(build(f'{mark} one'))[0])
    assert (error.kind, error.status, error.attempts) == (kind, status, 3)
    assert len(server.prompts) == 3


def test_an_element_that_kills_the_server_fails_alone(server: FakeServer) -> None:
    """Each crash loses every request in flight, yet only its cause runs out of retries.

    All are back before the next crash, and none is done by then.
    """
    limits = RequestLimits(max_retries=6)
    elements = [f'[sleep=0.2] {n}' for n in range(16)]
    elements.insert(3, '[sleep=0.1] [crash] poison')
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        outcomes = client.run(build(*elements))
    poison = failure(outcomes.pop(3))
    assert (poison.kind, poison.attempts) == (ErrorKind.ENGINE_DIED, 4)
    assert texts(outcomes) == [f'[SLEEP=0.2] {n}' for n in range(16)]


def test_a_server_that_is_away_and_slow_to_say_so_uses_up_no_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_retry, 'ENGINE_LOST_AFTER_S', 0.01)
    with (
        FakeServer() as server,
        InferenceClient(lambda: server.url, WINDOW, RequestLimits(max_retries=2)) as client,
    ):
        crowd = [f'[sleep=1] {n}' for n in range(CROWD - 1)]
        outcome, *others = client.run(build('[sleep=0.02] [status=503,6] one', *crowd))
        assert text_of(outcome) == '[SLEEP=0.02] [STATUS=503,6] ONE'
        assert outcome.retried == (RetryReason.ENGINE_LOST, *[RetryReason.UNAVAILABLE] * 5)
        assert all(isinstance(other, Answer) for other in others)


def test_a_frontend_without_its_engines_uses_up_no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element gets more errors than it has retries; those count only after an answer."""
    monkeypatch.setattr(_retry, 'MAX_BACKOFF_S', 0.1)
    with (
        FakeServer() as server,
        InferenceClient(lambda: server.url, WINDOW, RequestLimits(max_retries=6)) as client,
    ):
        outcomes = client.run(build(*(f'[status=500,20] {n}' for n in range(2 * CROWD))))
    assert texts(outcomes) == [f'[STATUS=500,20] {n}' for n in range(2 * CROWD)]


def test_a_server_that_fails_all_and_goes_on_so_fails_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retry, 'ERRING_S', 0.5)
    with (
        FakeServer() as server,
        InferenceClient(lambda: server.url, WINDOW, RequestLimits(max_retries=1)) as client,
    ):
        outcomes = client.run(build(*(f'[status=500] {n}' for n in range(2 * WINDOW))))
    assert texts(outcomes) == [ErrorKind.ENGINE_DIED] * 2 * WINDOW


def test_an_element_that_kills_its_engine_and_is_left_alone_fails(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_retry, 'ENGINE_LOST_AFTER_S', 0.01)
    with InferenceClient(lambda: server.url, WINDOW, RequestLimits()) as client:
        error = failure(client.run(build('[sleep=0.02] [status=503] poison', *'abc'))[0])
    assert (error.kind, error.attempts) == (ErrorKind.ENGINE_DIED, _retry.MAX_DEATHS)


# Deadlines.


def test_a_hung_request_is_given_up_without_hurting_others(
    client: InferenceClient, server: FakeServer
) -> None:
    hung = CompletionRequest('[hang] one', {'timeout': 0.2})
    outcomes = client.run(build(hung, *(f'good {n}' for n in range(20))))
    error = failure(outcomes[0])
    assert (error.kind, error.status, error.attempts) == (ErrorKind.DEADLINE_EXCEEDED, None, 3)
    assert texts(outcomes[1:]) == [f'GOOD {n}' for n in range(20)]
    wait_until('the server is told', lambda: server.cancelled == 3)


def test_a_request_that_hung_once_is_answered_at_the_next_try(client: InferenceClient) -> None:
    (outcome,) = client.run(build(CompletionRequest('[hang=1] one', {'timeout': 0.2})))
    assert isinstance(outcome, Answer)
    assert outcome.retried == (RetryReason.TIMEOUT,)


def test_all_attempts_of_an_element_together_are_bounded(server: FakeServer) -> None:
    limits = RequestLimits(request_timeout_s=0.2, element_timeout_s=0.5, max_retries=1000)
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        began = time.monotonic()
        error = failure(client.run(build('[hang] one'))[0])
        assert 0.4 <= time.monotonic() - began < 5
    assert error.kind is ErrorKind.DEADLINE_EXCEEDED
    assert 'no answer within' in error.message


def test_an_element_that_waits_for_its_place_again_is_bounded_too(server: FakeServer) -> None:
    limits = RequestLimits(element_timeout_s=0.5)
    with InferenceClient(lambda: server.url, 1) as client, client.stream(2, limits=limits) as own:
        own.put(BUILDER.build('[sleep=0.1] [status=500] one'), 1)
        with client.stream(2) as others:
            others.put(BUILDER.build('[hang] two'), 2)
            began = time.monotonic()
            [(_, outcome)] = own.drain()
        assert time.monotonic() - began < 5
    error = failure(outcome)
    assert (error.kind, error.status) == (ErrorKind.DEADLINE_EXCEEDED, 500)
    assert len(outcome.retried) == error.attempts - 1, 'only what was sent again is counted'


def test_a_wait_beyond_the_elements_bound_is_not_begun(server: FakeServer) -> None:
    limits = RequestLimits(element_timeout_s=5.0)
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        began = time.monotonic()
        error = failure(client.run(build('[status=429] [retry_after=60] one'))[0])
        assert time.monotonic() - began < 4
    assert (error.kind, error.status) == (ErrorKind.DEADLINE_EXCEEDED, 429)
