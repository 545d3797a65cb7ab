"""However a call, a client or a process ends, it is told and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo._clients import Address, client_for
from apache_beam_vllm_dynamo._loop import loop_thread
from apache_beam_vllm_dynamo._responses import Failure
from apache_beam_vllm_dynamo._retry import RequestLimits
from apache_beam_vllm_dynamo._sender import Sender
from apache_beam_vllm_dynamo.errors import (
    RuntimeFailedError,
)
from apache_beam_vllm_dynamo.messages import CompletionRequest
from tests.client.calls import (
    WINDOW,
    InThread,
    build,
    failure,
    loops,
    texts,
)
from tests.fake_server import FakeServer
from tests.support.processes import wait_until

# Ends.


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """A shell has what it starts in the background ignore interruptions, tests included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures('_interruptible')
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


def in_a_fork(does: Callable[[], bool]) -> bool:
    """What ``does`` returned in a forked child; False, too, where it raised or hung."""
    child = os.fork()
    if child == 0:
        # The kernel ends it if it hangs: nothing else could.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if does() else 2
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_forked_child_has_a_loop_of_its_own(client: InferenceClient, server: FakeServer) -> None:
    def asks() -> bool:
        with client:
            return texts(client.run(build('child'))) == ['CHILD']

    assert texts(client.run(build('parent'))) == ['PARENT']
    assert in_a_fork(asks)
    assert texts(client.run(build('parent again'))) == ['PARENT AGAIN']
    assert 'child' in server.prompts


@pytest.mark.filterwarnings('ignore:.*fork.*:DeprecationWarning')
def test_a_child_forked_while_a_thread_makes_a_client_can_make_its_own() -> None:
    def make(_: Address) -> InferenceClient:
        assert in_a_fork(lambda: client_for('two', lambda _: of_the_fork).client is of_the_fork)
        return of_the_parent

    of_the_fork = InferenceClient(lambda: '', WINDOW)
    of_the_parent = InferenceClient(lambda: '', WINDOW)
    assert client_for('one', make).client is of_the_parent


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


def test_a_client_dropped_while_the_process_ends_is_quiet() -> None:
    program = (
        'import asyncio, sys, threading\n'
        'from apache_beam_vllm_dynamo import _loop\n'
        "print('imported', file=sys.stderr)\n"
        'end, ending = _loop._end, threading.Event()\n'
        'async def slow_end(session):\n'
        '    ending.set()\n'
        '    await asyncio.sleep(0.3)\n'  # in which the other thread lets go
        '    await end(session)\n'
        '_loop._end = slow_end\n'
        'thread = _loop.loop_thread()\n'
        'loop = thread.acquire()\n'
        'def let_go():\n'
        '    ending.wait()\n'
        '    thread.release(loop)\n'
        'threading.Thread(target=let_go, daemon=True).start()\n'
    )
    ended = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, timeout=30, check=False
    )
    assert 'imported' in ended.stderr
    assert (ended.returncode, ended.stderr.partition('imported\n')[2]) == (0, '')


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
