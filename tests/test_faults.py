"""What dies in the midst of work costs a pause and no element: on four simulated engines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.utils.multi_process_shared import MultiProcessShared

from apache_beam_vllm_dynamo import (
    LLMInference,
    RuntimeFailedError,
    VLLMCompletionsModelHandler,
    _probes,
    _retry,
)
from apache_beam_vllm_dynamo._commands import FRONTEND_LEASE_SECS
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._routing import listening_ports
from benchmarks import _fault_kills, _fault_leftovers, _fault_takeover
from benchmarks._fault_injection import config_fields, not_whole, runtime_of
from benchmarks._fault_pipeline import Settings, starts_of
from tests.support.pipelines import IN_PROCESS, our_metrics
from tests.support.processes import runs, wait_until
from tests.support.stacks import MODEL, metric, simulated

pytestmark = pytest.mark.usefixtures('nothing_left')

ENGINES = 4
# 40 tokens take 0.8 s at the pace of a GPU, so that there is always something in flight.
BATCH = [f'{i}: what does it cost?' for i in range(200)]
ARGUMENTS = {'max_tokens': 40}


def handler_of(
    env_vars: dict[str, str] | None = None, **fields: Any
) -> VLLMCompletionsModelHandler:
    fields.setdefault('simulation_kwargs', {})
    fields.setdefault('vllm_server_kwargs', {'max-num-seqs': 32})
    config = simulated(ENGINES, **fields)
    return VLLMCompletionsModelHandler(
        MODEL,
        use_dynamo=True,
        dynamo_runtime_config=config,
        on_error='return',
        env_vars=env_vars or {},
    )


class Work:
    """Batches that follow each other in two threads until somebody says that it is enough."""

    def __init__(self, handler: VLLMCompletionsModelHandler, model: Any) -> None:
        self._handler = handler
        self._model = model
        self._enough = threading.Event()
        self._threads = ThreadPoolExecutor(2)
        self._batches = [self._threads.submit(self._ask) for _ in range(2)]

    def _ask(self) -> list[Any]:
        inferences = []
        while not self._enough.is_set():
            results = self._handler.run_inference(BATCH, self._model, ARGUMENTS)
            assert [result.example for result in results] == BATCH
            inferences += [result.inference for result in results]
        return inferences

    def finish(self) -> list[Any]:
        """What every element got."""
        self._enough.set()
        self._threads.shutdown()
        return [inference for batch in self._batches for inference in batch.result()]


@contextlib.contextmanager
def under_load(handler: VLLMCompletionsModelHandler, model: Any) -> Iterator[Work]:
    """Requests in flight during the block; afterwards each has its whole answer."""
    work = Work(handler, model)
    try:
        time.sleep(0.5)  # in the midst of the first answers
        yield work
    finally:
        inferences = work.finish()
    assert len(inferences) >= 2 * len(BATCH)
    failed = [str(i) for i in inferences if not hasattr(i, 'choices')]
    assert failed == []
    assert {inference.usage.completion_tokens for inference in inferences} == {40}


def pid_of(model: Any, label: str) -> int:
    pid = next(status.pid for status in model.status() if status.label == label)
    assert pid is not None
    return int(pid)


def wait_until_whole(model: Any, *victims: str, before: dict[str, int], bound_s: float) -> float:
    """Waits until all victims are replaced and all engines routable; how long it took."""
    began = time.monotonic()
    replaced = {label: before[label] for label in victims}
    wait_until('the stack is whole', lambda: not not_whole(model, replaced), bound_s)
    return time.monotonic() - began


def pids(model: Any) -> dict[str, int]:
    return {status.label: status.pid for status in model.status()}


@pytest.mark.parametrize(
    ('victims', 'number', 'bound_s'),
    [
        pytest.param(('engine 1 of 4',), signal.SIGKILL, 15, id='an engine is killed'),
        pytest.param(
            ('engine 1 of 4', 'engine 3 of 4'), signal.SIGKILL, 15, id='two engines are killed'
        ),
        pytest.param(('engine 2 of 4',), signal.SIGSTOP, 15, id='an engine is stopped'),
        pytest.param(('frontend',), signal.SIGKILL, 20, id='the frontend is killed'),
        pytest.param(('event broker',), signal.SIGKILL, 15, id='the event broker is killed'),
        pytest.param(('etcd',), signal.SIGKILL, 20, id='etcd is killed'),
    ],
)
def test_no_element_is_lost_and_the_stack_is_whole_again_when(
    victims: tuple[str, ...], number: int, bound_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    handler = handler_of()
    model = handler.load_model()
    before = pids(model)
    with caplog.at_level(logging.INFO), under_load(handler, model):
        for label in victims:
            os.kill(before[label], number)
        wait_until_whole(model, *victims, before=before, bound_s=bound_s)
    after = model.status()
    assert {s.label: s.restarts for s in after if s.restarts} == dict.fromkeys(victims, 1)
    assert {s.label for s in after if s.last_error} == set(victims)
    others = before.keys() - set(victims)
    assert {label: pids(model)[label] for label in others} == {
        label: before[label] for label in others
    }
    for label in victims:
        said = [r for r in caplog.records if r.getMessage().startswith(f'{label}: ')]
        assert [r.levelname for r in said if r.levelno > logging.INFO] == ['WARNING']


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests ask more often whether the server is there again, which saves seconds."""
    monkeypatch.setattr(_retry, 'MAX_BACKOFF_S', 0.5)


@pytest.mark.usefixtures('_eager')
def test_etcd_that_is_away_for_longer_than_a_lease_costs_a_pause(tmp_path: Path) -> None:
    """Engines end by themselves then, and that is not held against them."""
    down = tmp_path / 'down'
    lease = {'ETCD_LEASE_TTL': '2'}
    handler = handler_of(lease, **config_fields('etcd_down_40_s', down))
    model = handler.load_model()
    before = pids(model)
    with under_load(handler, model):
        down.touch()
        os.kill(before['etcd'], signal.SIGKILL)
        wait_until('an engine has ended', lambda: not all(map(runs, engines_of(before))), 30)
        down.unlink()
        wait_until_whole(model, 'etcd', before=before, bound_s=30)


def test_etcd_that_is_killed_costs_the_frontend_nothing_later_either() -> None:
    """It needs some ten seconds until it has all its connections to the next one."""
    model = handler_of().load_model()
    before = pids(model)
    port = runtime_of(model)._stack.addresses.etcd_client_port
    os.kill(before['etcd'], signal.SIGKILL)
    wait_until_whole(model, 'etcd', before=before, bound_s=20)
    nearly_s = FRONTEND_LEASE_SECS - 5
    wait_until('its lease has aged', lambda: lasts_s(port) < nearly_s, 20)
    wait_until('its lease is renewed', lambda: lasts_s(port) > nearly_s, 20)
    assert pids(model) == before | {'etcd': pids(model)['etcd']}


def lasts_s(etcd_port: int) -> int:
    """How long the longest lease still lasts: of all, the frontend's."""

    def ask(path: str, **body: Any) -> Any:
        url = f'http://127.0.0.1:{etcd_port}/v3/lease/{path}'
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=10) as answer:
            return json.load(answer)

    return max(int(ask('timetolive', **lease).get('TTL', 0)) for lease in ask('leases')['leases'])


@pytest.mark.usefixtures('_eager')
def test_etcd_that_outlived_nobody_forgets_them(tmp_path: Path) -> None:
    """It would list the dead until their leases end, and some requests would be sent to them."""
    down = tmp_path / 'down'
    handler = handler_of({'ETCD_LEASE_TTL': '2'}, **config_fields('etcd_down_40_s', down))
    model = handler.load_model()
    before = pids(model)
    of_this_data = Path(runtime_of(model)._stack.addresses.etcd_directory, 'mark')
    of_this_data.touch()
    with under_load(handler, model):
        down.touch()
        os.kill(before['etcd'], signal.SIGKILL)
        others = [*engines_of(before), before['frontend']]
        wait_until('all others have ended', lambda: not any(map(runs, others)), 40)
        assert of_this_data.exists()
        down.unlink()
        wait_until_whole(model, 'etcd', before=before, bound_s=30)
    assert not of_this_data.exists()


def engines_of(by_label: dict[str, int]) -> list[int]:
    return [pid for label, pid in by_label.items() if label.startswith('engine')]


@pytest.mark.usefixtures('_eager')
def test_an_external_etcd_that_is_silent_and_then_gone_costs_a_pause(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{free.getsockname()[1]}'
    command = [
        find_etcd(None, os.environ.get('PATH')), '--data-dir', str(tmp_path / 'data'),
        '--listen-client-urls', url, '--advertise-client-urls', url,
        '--listen-peer-urls', 'http://127.0.0.1:0', '--log-level', 'error',
    ]  # fmt: skip

    @contextlib.contextmanager
    def etcd() -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(command) as process:
            try:
                yield process
            finally:
                process.kill()

    handler = VLLMCompletionsModelHandler(
        MODEL,
        use_dynamo=True,
        dynamo_runtime_config=simulated(1, simulation_kwargs={}),
        on_error='return',
        env_vars={'ETCD_ENDPOINTS': url, 'ETCD_LEASE_TTL': '2'},
    )
    with etcd() as process:
        model = handler.load_model()
        before = pids(model)
        work = Work(handler, model)
        try:
            process.send_signal(signal.SIGSTOP)  # it still takes connections
            os.kill(before['engine 1 of 1'], signal.SIGKILL)
            time.sleep(3)
            process.kill()
            process.wait()
            wait_until('the frontend has ended', lambda: not runs(before['frontend']), 30)
            # Nothing was tried meanwhile.
            assert [status.restarts for status in model.status()] == [0] * len(before)
            with etcd():
                wait_until('the stack is whole', lambda: not not_whole(model, {}), 40)
                inferences = work.finish()
                model.close()
        finally:
            work.finish()
    assert [str(i) for i in inferences if not hasattr(i, 'choices')] == []


def test_an_engine_that_dies_on_every_start_fails_the_job_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('apache_beam_vllm_dynamo._restart.RestartPolicy.backoff_s', lambda *_: 0.1)
    down = tmp_path / 'down'
    handler = handler_of(**config_fields('engine_dies_on_every_start', down))
    model = handler.load_model()
    down.touch()
    os.kill(pid_of(model, 'engine 4 of 4'), signal.SIGKILL)
    with pytest.raises(
        RuntimeFailedError, match=r'engine 4 of 4.*failed 6 times in a row'
    ) as raised:
        ask_for_ever(handler, model)
    assert raised.value.log_tail == ('the simulated engine is broken',)
    # The job may hear of it while the others are still being ended.
    wait_until(
        'the others are stopped',
        lambda: [str(status.state) for status in model.status()].count('stopped') == 6,
    )
    assert {s.label for s in model.status() if s.state == 'failed'} == {'engine 4 of 4'}


def ask_for_ever(handler: VLLMCompletionsModelHandler, model: Any) -> None:
    while True:
        handler.run_inference(BATCH, model, ARGUMENTS)


def test_a_frontend_whose_port_was_taken_moves_to_another() -> None:
    handler = handler_of()
    model = handler.load_model()
    before = pids(model)
    old = model.endpoint()
    port = int(old.rpartition(':')[2])
    with under_load(handler, model), socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(before['frontend'], signal.SIGKILL)
        wait_until('the port is taken', lambda: binds(thief, port), 10)
        thief.listen()
        wait_until('its end is noticed', lambda: pids(model)['frontend'] != before['frontend'])
        # Who asks is kept waiting, and not sent to the engines that happen to be found first.
        assert model.endpoint() != old
        assert not not_whole(model, {'frontend': before['frontend']})


def binds(thief: socket.socket, port: int) -> bool:
    with contextlib.suppress(OSError):
        thief.bind(('127.0.0.1', port))
        return True
    return False


def test_another_sdk_process_takes_over_from_a_killed_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the same job: no element is lost, and all that was the owner's is gone."""
    for name, value in {'PROCESSES': 2, 'BUNDLES': 5, 'KILL_AFTER': 1}.items():
        monkeypatch.setattr(_fault_takeover, name, value)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        env = _fault_kills.environment(directory)
        settings = Settings(
            'owner_killed', prompts=300, max_tokens=40, max_num_seqs=32, speedup=1.0, directory=name
        )
        report = _fault_takeover.run(settings, env, directory / 'log')
        owner, successor = starts_of(settings)
        left = _fault_leftovers.wait_until_none(env['TMPDIR'], 10)
    assert (report['problem'], report['amiss']) == ('', '')
    assert report['elements_out'] == report['elements_in'] == 300
    assert (report['lost'], report['doubled'], report['failed']) == (0, 0, 0)
    assert report['repeated_bundles'] == ['its SDK process died']  # and none of the other's
    assert owner.pid != successor.pid
    assert report['most_sets_of_engines'] == 1
    assert left == _fault_leftovers.NOTHING


def test_what_the_frontend_routes_to_is_told_from_what_listens() -> None:
    model = handler_of().load_model()
    port = int(model.endpoint().rpartition(':')[2])
    routed = _probes.routed_ports(port, runtime_of(model)._stack.namespace)
    assert routed is not None
    assert len(routed) == ENGINES
    for pid in engines_of(pids(model)):
        assert len(routed & listening_ports(pid)) == 1


def test_the_state_of_each_process_is_read_through_a_proxy(tmp_path: Path) -> None:
    handler = handler_of()
    shared = MultiProcessShared(  # not by a tag in /tmp that other runs have too
        handler.load_model, tag='test_faults', path=str(tmp_path), always_proxy=True
    )
    model: Any = shared.acquire()
    try:
        before = pids(model)
        os.kill(before['engine 2 of 4'], signal.SIGKILL)
        seen: Callable[[], bool] = lambda: any(  # noqa: E731
            s.label == 'engine 2 of 4' and s.state == 'restarting' for s in model.status()
        )
        wait_until('it is seen to restart', seen)
        wait_until('it serves', lambda: all(status.state == 'serving' for status in model.status()))
        status = next(s for s in model.status() if s.label == 'engine 2 of 4')
        assert status.restarts == 1
        assert status.last_error == 'ended: killed by SIGKILL'
        assert status.pid not in (None, before['engine 2 of 4'])
    finally:
        model.close()
        shared.release(model)


class _Watched(VLLMCompletionsModelHandler):
    """Its engine dies when some of its answers are there."""

    def load_model(self) -> Any:
        model = super().load_model()
        threading.Thread(target=_kill_under_way, args=(model,), daemon=True).start()
        return model


def _kill_under_way(model: Any) -> None:
    inflight = 'dynamo_frontend_inflight_requests'
    wait_until('requests are under way', lambda: metric(model.endpoint(), inflight) > 40)
    os.kill(pid_of(model, 'engine 1 of 4'), signal.SIGKILL)


def test_a_job_counts_the_requests_that_moved_to_another_engine() -> None:
    handler = _Watched(
        MODEL,
        use_dynamo=True,
        dynamo_runtime_config=simulated(ENGINES, simulation_kwargs={}),
        on_error='return',
    )
    pipeline = beam.Pipeline(options=IN_PROCESS)
    _ = pipeline | beam.Create(BATCH) | LLMInference(handler, {'max_tokens': 150})
    result = pipeline.run()
    result.wait_until_finish()
    metrics = our_metrics(result)
    assert metrics['num_inferences'] == len(BATCH)
    assert metrics['completion_tokens'] == 150 * len(BATCH)
    assert metrics['migrated_requests'] > 0
    assert not [name for name in metrics if name.startswith('failed')]
