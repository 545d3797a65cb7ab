"""The request path against a real server that misbehaves on demand."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion
from openai.types.completion_usage import PromptTokensDetails

from apache_beam_vllm_dynamo import _client, _retry
from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo._loop import loop_thread
from apache_beam_vllm_dynamo._requests import Endpoint, PreparedRequest, RequestBuilder
from apache_beam_vllm_dynamo._responses import Answer, Failure, Outcome
from apache_beam_vllm_dynamo._retry import RequestLimits, RetryReason
from apache_beam_vllm_dynamo._sender import Sender
from apache_beam_vllm_dynamo.errors import (
    ConfigurationError,
    ErrorKind,
    InferenceError,
    RuntimeFailedError,
)
from apache_beam_vllm_dynamo.messages import CompletionRequest, OpenAIChatMessage
from tests.fake_server import FakeServer
from tests.support.processes import wait_until

WINDOW = 8
# Short, so that the tests need not wait for what ends by a limit.
QUICK = RequestLimits(
    request_timeout_s=10.0, element_timeout_s=20.0, max_wait_s=10.0, max_retries=2
)
BUILDER = RequestBuilder('model', Endpoint.COMPLETIONS)


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


def sockets() -> list[str]:
    found = []
    for descriptor in pathlib.Path('/proc/self/fd').iterdir():
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith(('socket:', 'anon_inode:[eventpoll]')):
                found.append(target)
    return found


def loops() -> int:
    """How many event loop threads of clients there are."""
    return [thread.name for thread in threading.enumerate()].count('vllm-dynamo-client')


def build(*elements: object) -> list[PreparedRequest | InferenceError]:
    return [BUILDER.build(element) for element in elements]


def texts(outcomes: Sequence[Outcome]) -> list[str | ErrorKind]:
    """The text of each answer, or the kind of error where there is none."""
    return [text_of(outcome) for outcome in outcomes]


def text_of(outcome: Outcome) -> str | ErrorKind:
    if isinstance(outcome, Failure):
        return outcome.error.kind
    assert isinstance(outcome.response, Completion)
    return outcome.response.choices[0].text


def failure(outcome: Outcome) -> InferenceError:
    assert isinstance(outcome, Failure), outcome
    assert outcome.error.attempts == outcome.attempts
    return outcome.error


class InThread(threading.Thread):
    """Calls a function in a thread and keeps what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error

    def wait(self) -> Any:
        self.join(20)
        assert not self.is_alive(), 'the call hangs'
        if self.error is not None:
            raise self.error
        return self.result


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
    assert (poison.kind, poison.attempts) == (ErrorKind.ENGINE_DIED, 7)
    assert texts(outcomes) == [f'[SLEEP=0.2] {n}' for n in range(16)]


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


def test_a_wait_beyond_the_elements_bound_is_not_begun(server: FakeServer) -> None:
    limits = RequestLimits(element_timeout_s=5.0)
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        began = time.monotonic()
        error = failure(client.run(build('[status=429] [retry_after=60] one'))[0])
        assert time.monotonic() - began < 4
    assert (error.kind, error.status) == (ErrorKind.DEADLINE_EXCEEDED, 429)


# The window.


def test_never_more_than_the_window_is_in_flight(
    client: InferenceClient, server: FakeServer
) -> None:
    server.latency_s = 0.005
    callers = [InThread(lambda: client.run(build(*(f'{n}' for n in range(40))))) for _ in range(5)]
    for caller in callers:
        assert texts(caller.wait()) == [f'{n}' for n in range(40)]
    assert server.most_in_flight == WINDOW
    assert server.connections <= WINDOW


def test_connections_are_kept_for_the_next_batch(
    client: InferenceClient, server: FakeServer
) -> None:
    for n in range(10):
        assert texts(client.run(build(f'{n}'))) == [f'{n}']
    assert server.connections == 1


def test_one_batch_does_not_wait_for_the_slowest_of_another(
    client: InferenceClient, server: FakeServer
) -> None:
    slow = InThread(lambda: client.run(build('[hang=1] slow')))
    wait_until('the slow one is there', lambda: server.in_flight == 1)
    assert texts(client.run(build(*'abcdefghijkl'))) == list('ABCDEFGHIJKL')
    assert slow.is_alive()
    client.close()
    with pytest.raises(RuntimeFailedError):
        slow.wait()


def test_callers_are_served_in_the_order_in_which_they_came(server: FakeServer) -> None:
    server.latency_s = 0.01
    with InferenceClient(lambda: server.url, 1, QUICK) as client:
        first = InThread(lambda: client.run(build('a1', 'a2', 'a3')))
        wait_until('the first is there', lambda: server.prompts)
        second = InThread(lambda: client.run(build('b1', 'b2')))
        first.wait()
        second.wait()
    assert server.prompts == ['a1', 'a2', 'a3', 'b1', 'b2']


def test_an_element_in_trouble_of_its_own_gives_its_place_to_others(server: FakeServer) -> None:
    with InferenceClient(lambda: server.url, 1, QUICK) as client:
        outcomes = client.run(build('[status=500,1] a', 'b', 'c'))
    assert texts(outcomes) == ['[STATUS=500,1] A', 'B', 'C']
    assert server.prompts[:2] == ['[status=500,1] a', 'b']


def test_an_element_that_is_sent_again_goes_before_those_that_never_were(
    server: FakeServer,
) -> None:
    server.latency_s = 0.01
    with InferenceClient(lambda: server.url, 1, QUICK) as client:
        client.run(build('[status=500,1] a', *(f'{n}' for n in range(30))))
    assert server.prompts.count('[status=500,1] a') == 2
    assert '[status=500,1] a' in server.prompts[1:-10]


@pytest.mark.parametrize('window', [0, -1, 2.5, True, None])
def test_a_window_that_cannot_work_is_refused(window: Any) -> None:
    with pytest.raises(ConfigurationError, match='window'):
        InferenceClient(lambda: '', window)


# The server's address.


def test_a_server_that_comes_back_on_another_port_is_found() -> None:
    with FakeServer() as first:
        url = first.url
        with InferenceClient(lambda: url, WINDOW, QUICK) as client:
            hung = InThread(lambda: client.run(build('[hang=1] one', '[hang=1] two')))
            wait_until('both are there', lambda: first.in_flight == 2)
            with FakeServer() as second:
                url = second.url
                first.stop()
                # They hang once more, at the new server, where they are counted anew.
                wait_until('both are sent again', lambda: second.in_flight == 2)
                assert texts(client.run(build('three'))) == ['THREE']
                client.close()
                with pytest.raises(RuntimeFailedError):
                    hung.wait()


def test_a_server_that_is_not_there_yet_is_waited_for() -> None:
    with FakeServer() as server:
        port = server.port
    limits = RequestLimits(max_wait_s=20.0, max_retries=0)
    with InferenceClient(lambda: f'http://127.0.0.1:{port}', WINDOW, limits) as client:
        call = InThread(lambda: client.run(build('one', 'two')))
        call.join(0.2)
        assert call.is_alive()
        with FakeServer(port):
            outcomes = call.wait()
            client.close()
    assert texts(outcomes) == ['ONE', 'TWO']
    assert set(outcomes[0].retried) == {RetryReason.CONNECT}


def test_a_server_that_never_comes_is_unavailable() -> None:
    with FakeServer() as server:
        url = server.url
    limits = RequestLimits(max_wait_s=0.2)
    with InferenceClient(lambda: url, WINDOW, limits) as client:
        error = failure(client.run(build('one'))[0])
    assert (error.kind, error.status) == (ErrorKind.UNAVAILABLE, None)
    assert 'Connection refused' in error.message or 'no connection' in error.message


def test_the_address_is_asked_for_once_while_it_works(server: FakeServer) -> None:
    asked = []

    def endpoint() -> str:
        asked.append(threading.current_thread())
        return server.url

    with InferenceClient(endpoint, WINDOW, QUICK) as client:
        client.run(build(*(f'{n}' for n in range(50))))
        client.run(build('one'))
    assert len(asked) == 1
    assert asked[0] is not threading.current_thread()


def test_an_address_that_blocks_does_not_block_other_clients(server: FakeServer) -> None:
    release = threading.Event()

    def endpoint() -> str:
        assert release.wait(20)
        return server.url

    with InferenceClient(endpoint, WINDOW, QUICK) as slow:
        call = InThread(lambda: slow.run(build('slow')))
        with InferenceClient(lambda: server.url, WINDOW, QUICK) as quick:
            assert texts(quick.run(build('quick'))) == ['QUICK']
        assert call.is_alive()
        release.set()
        assert texts(call.wait()) == ['SLOW']


def test_an_address_that_does_not_come_is_bounded_as_an_attempt_is() -> None:
    release = threading.Event()

    def endpoint() -> str:
        release.wait(20)
        return ''

    limits = RequestLimits(request_timeout_s=0.1, max_wait_s=0.2)
    with InferenceClient(endpoint, WINDOW, limits) as client:
        error = failure(client.run(build('one'))[0])
        release.set()
    assert error.kind is ErrorKind.UNAVAILABLE
    assert 'the address of the server was not known' in error.message


def test_a_server_that_failed_for_good_ends_all_who_wait_at_once(server: FakeServer) -> None:
    """What the address function raises reaches every caller, also those of hung requests."""
    answers = iter([server.url])

    def endpoint() -> str:
        for url in answers:
            return url
        raise RuntimeFailedError('engine 1 died four times')

    with InferenceClient(endpoint, WINDOW, QUICK) as client:
        hung = InThread(lambda: client.run(build('[hang] one')))
        wait_until('the hung one is there', lambda: server.in_flight == 1)
        with pytest.raises(RuntimeFailedError, match='engine 1 died four times'):
            client.run(build('good', '[cut] two'))
        with pytest.raises(RuntimeFailedError, match='engine 1 died four times'):
            hung.wait()
        # The next batch asks again, for a server may have been started anew.
        answers = iter([server.url])
        assert texts(client.run(build('three'))) == ['THREE']


@pytest.mark.parametrize('url', ['', 'https://127.0.0.1:1', 'http://127.0.0.1:1/v1', None])
def test_an_address_that_is_none_is_told(url: Any) -> None:
    with (
        InferenceClient(lambda: url, WINDOW, QUICK) as client,
        pytest.raises(ConfigurationError, match='The address of the server is'),
    ):
        client.run(build('one'))


# Ends.


def test_an_interrupted_call_leaves_no_request_behind(
    client: InferenceClient, server: FakeServer
) -> None:
    def interrupt() -> None:
        wait_until('the window is full', lambda: server.in_flight == WINDOW)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = InThread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.run(build(*(f'[hang] {n}' for n in range(30))))
    interrupter.wait()
    # Sooner than they would end by themselves.
    wait_until('all are cancelled', lambda: server.in_flight == 0, timeout_s=5)
    assert len(server.prompts) == WINDOW
    assert texts(client.run(build('next'))) == ['NEXT']


def test_a_bug_of_the_client_is_raised_not_swallowed(
    client: InferenceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Sender, 'send', send)
        with pytest.raises(ZeroDivisionError):
            client.run(build('one', 'two'))
    assert texts(client.run(build('next'))) == ['NEXT']


@pytest.mark.filterwarnings(
    'ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_loop_that_died_hangs_nobody(client: InferenceClient, server: FakeServer) -> None:
    call = InThread(lambda: client.run(build('[hang] one')))
    wait_until('it is there', lambda: server.in_flight == 1)

    def end() -> None:
        raise SystemExit

    loop = loop_thread().acquire()
    loop.call_soon_threadsafe(end)
    with pytest.raises(RuntimeFailedError, match='ended'):
        call.wait()
    wait_until('the loop is gone', loop.is_closed)
    assert texts(client.run(build('next'))) == ['NEXT']
    loop_thread().release(loop)
    assert texts(client.run(build('again'))) == ['AGAIN']


def test_closing_ends_those_who_wait(client: InferenceClient, server: FakeServer) -> None:
    calls = [InThread(lambda: client.run(build('[hang] one'))) for _ in range(3)]
    wait_until('they are there', lambda: server.in_flight == 3)
    client.close()
    for call in calls:
        with pytest.raises(RuntimeFailedError, match='closed'):
            call.wait()
    wait_until('the server is told', lambda: server.in_flight == 0)


def test_a_closed_client_says_so_and_can_be_closed_again(client: InferenceClient) -> None:
    client.run(build('one'))
    client.close()
    client.close()
    with pytest.raises(RuntimeFailedError, match='closed'):
        client.run(build('one'))
    with pytest.raises(RuntimeFailedError, match='closed'):
        client.stream(1)


def test_nothing_is_started_before_the_first_request() -> None:
    threads = threading.active_count()
    client = InferenceClient(lambda: 'http://127.0.0.1:1', WINDOW)
    assert threading.active_count() == threads
    client.close()


def test_all_clients_share_one_thread_and_the_last_one_ends_it(server: FakeServer) -> None:
    first = InferenceClient(lambda: server.url, WINDOW)
    second = InferenceClient(lambda: server.url, WINDOW)
    first.run(build('one'))
    second.run(build('two'))
    assert loops() == 1
    first.close()
    assert texts(second.run(build('three'))) == ['THREE']
    second.close()
    assert loops() == 0
    with InferenceClient(lambda: server.url, WINDOW) as third:
        assert texts(third.run(build('four'))) == ['FOUR']


def test_a_client_that_is_dropped_closes_itself(server: FakeServer) -> None:
    client = InferenceClient(lambda: server.url, WINDOW)
    client.run(build('one'))
    assert loops() == 1
    del client
    gc.collect()
    wait_until('the loop ends', lambda: loops() == 0)


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_forked_child_has_a_loop_of_its_own(client: InferenceClient, server: FakeServer) -> None:
    assert texts(client.run(build('parent'))) == ['PARENT']
    child = os.fork()
    if child == 0:
        # The kernel ends it if it hangs: nothing else could.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if texts(client.run(build('child'))) == ['CHILD'] else 2
            client.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert texts(client.run(build('parent again'))) == ['PARENT AGAIN']
    assert 'child' in server.prompts


def test_a_process_that_ends_with_an_open_client_is_quiet(server: FakeServer) -> None:
    program = (
        'import sys\n'
        'from apache_beam_vllm_dynamo._client import InferenceClient\n'
        'from apache_beam_vllm_dynamo._requests import Endpoint, RequestBuilder\n'
        "print('imported', file=sys.stderr)\n"  # what Beam says before is not ours
        f'client = InferenceClient(lambda: {server.url!r}, 4)\n'
        "request = RequestBuilder('m', Endpoint.COMPLETIONS).build('one')\n"
        'print(client.run([request])[0].response.choices[0].text)\n'
    )
    ended = subprocess.run(
        [sys.executable, '-X', 'dev', '-W', 'error::ResourceWarning', '-c', program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    said = ended.stderr.partition('imported\n')[2]
    assert (ended.returncode, ended.stdout, said) == (0, 'ONE\n', '')
    assert 'imported' in ended.stderr


def test_importing_starts_no_thread_and_registers_nothing() -> None:
    program = (
        'import threading, sys\n'
        'import apache_beam_vllm_dynamo._client\n'
        'print(threading.active_count(), "vllm" in sys.modules)\n'
    )
    ended = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout == '1 False\n'


# Discretion.


def test_no_prompt_and_no_key_is_in_a_log_or_an_error(
    client: InferenceClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {'extra_headers': {'Authorization': 'Bearer KEY'}}
    marks = ('[cut]', '[half]', '[body=broken_json]', '[empty404=1]', '[status=503,1]')
    outcomes = client.run(build(*(CompletionRequest(f'{mark} SECRET', headers) for mark in marks)))
    told = caplog.text + ''.join(
        str(outcome.error) for outcome in outcomes if isinstance(outcome, Failure)
    )
    assert len(texts(outcomes)) == 5
    assert 'SECRET' not in told
    assert 'KEY' not in told
    assert caplog.text.count('Requests wait for the server') == 1


@pytest.mark.parametrize(('chars', 'shown'), [(200, True), (0, False)])
def test_a_server_that_repeats_the_prompt_can_be_silenced(
    server: FakeServer, chars: int, *, shown: bool
) -> None:
    limits = RequestLimits(excerpt_chars=chars)
    with InferenceClient(lambda: server.url, WINDOW, limits) as client:
        error = failure(client.run(build('[status=400] SECRET' + 'x' * 1000))[0])
    assert ('SECRET' in error.message) is shown
    assert len(error.message) < 300


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
