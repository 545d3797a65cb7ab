"""Many callers share one window, and one server that may come and go."""

from __future__ import annotations

import resource
import threading
from typing import Any

import pytest

from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo._retry import RequestLimits, RetryReason
from apache_beam_vllm_dynamo.errors import (
    ConfigurationError,
    ErrorKind,
    RuntimeFailedError,
)
from tests.client.calls import (
    QUICK,
    WINDOW,
    InThread,
    build,
    failure,
    texts,
)
from tests.fake_server import FakeServer
from tests.support.processes import wait_until

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


def test_a_window_of_more_than_the_connections_a_process_may_hold_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (256, 4096))
    InferenceClient(lambda: '', 128)
    assert not caplog.records
    InferenceClient(lambda: '', 129)
    (said,) = caplog.messages
    assert said.startswith(
        'Up to 129 requests should be in flight, but this process may hold only 128'
    )
    assert said.endswith('Raise the limit (ulimit -n), or set max_in_flight.')


def test_no_request_spends_its_time_on_the_wait_for_a_connection(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (32, 4096))
    server.latency_s = 0.2
    limits = RequestLimits(request_timeout_s=0.5, max_retries=0)
    with InferenceClient(lambda: server.url, 64, limits) as client:
        outcomes = client.run(build(*map(str, range(64))))
    assert texts(outcomes) == [*map(str, range(64))]


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
