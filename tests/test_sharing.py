"""One server for all who load the same model with the same settings, here and elsewhere."""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    KeyModelMapping,
    ModelHandler,
    PredictionResult,
    RunInference,
    _RunInferenceDoFn,
)
from apache_beam.utils.multi_process_shared import MultiProcessShared

from apache_beam_vllm_dynamo import (
    ChildExitedError,
    DevicesBusyError,
    DynamoRuntimeConfig,
    RuntimeFailedError,
    StartError,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
    _model_server,
    _sharing,
)
from apache_beam_vllm_dynamo._device_lock import Claim, DeviceLocks
from apache_beam_vllm_dynamo._door import Caller, Door, LineLostError
from apache_beam_vllm_dynamo._identity import installation
from apache_beam_vllm_dynamo._lock_files import lock_directory, read_note
from apache_beam_vllm_dynamo._model_server import _VLLMModelServer
from apache_beam_vllm_dynamo._service import RESTART_POLICY
from tests.support.pipelines import IN_PROCESS, collect, collected
from tests.support.processes import ROOT, ProcessTree, ends_under, fds_of, runs, wait_until
from tests.support.stacks import FAKE_MODULES, MODEL, directories

pytestmark = pytest.mark.usefixtures('nothing_left')

# Loads the handler of `native`, says the server's process id, and does what it is told.
LOADS = """
import os, signal, sys
from tests.test_sharing import failure, native
signal.alarm(100)
model = native(sys.argv[1]).load_model()
for line in sys.stdin:
    print(eval(line), flush=True)
"""


def native(directory: Path | str, **env: str) -> VLLMCompletionsModelHandler:
    """The native server, a fake that notes its starts, on a worker with one GPU."""
    own = {'RECORD_STARTS': f'{directory}/starts', 'START_GATE': f'{directory}/gate'}
    env = {'PYTHONPATH': FAKE_MODULES, 'CUDA_VISIBLE_DEVICES': '0', **own, **env}
    return VLLMCompletionsModelHandler('m', env_vars=env)


def starts(directory: Path) -> list[int]:
    """The processes of the servers that were started, in order."""
    record = directory / 'starts'
    return [int(line) for line in record.read_text().split()] if record.exists() else []


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where servers note their starts; the gate is open."""
    (tmp_path / 'gate').touch()
    return tmp_path


class Other:
    """Another SDK process that has loaded the handler."""

    def __init__(self, directory: Path, tree: ProcessTree) -> None:
        self.process = subprocess.Popen(
            (sys.executable, '-c', LOADS, str(directory)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, **tree.env},
        )  # fmt: skip

    def ask(self, expression: str) -> str:
        """What an expression is there, once the handler is loaded."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f'{expression}\n')
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def server(self) -> int:
        """The process id of the server that it uses."""
        return int(self.ask('model.status()[0].pid'))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other_process(directory: Path) -> Iterator[Callable[[], Other]]:
    others: list[Other] = []

    def start() -> Other:
        others.append(Other(directory, tree))
        return others[-1]

    with ProcessTree() as tree:
        yield start
        for other in others:
            other.kill()
        tree.wait_until_gone()


def test_a_second_load_shares_the_server_of_the_first_until_the_last_has_left(
    directory: Path,
) -> None:
    first, second = native(directory).load_model(), native(directory).load_model()
    [pid] = starts(directory)
    assert first.status() == second.status()
    assert first.server_id() != second.server_id()
    first.close()
    first.close()
    assert runs(pid)
    assert len(native(directory).run_inference(['x'], second)) == 1
    with pytest.raises(RuntimeFailedError, match='closed'):
        first.endpoint()
    second.close()
    assert not runs(pid)
    assert [status.state for status in second.status()] == ['stopped']


def test_a_server_that_is_dropped_without_a_word_has_left(directory: Path) -> None:
    first, second = (_VLLMModelServer(native(directory)._runtime) for _ in range(2))
    [pid] = starts(directory)
    del first
    assert runs(pid)
    del second
    assert not runs(pid)


def test_what_was_loaded_outlives_a_stage_that_is_dropped(directory: Path) -> None:
    """Runners drop a stage that had no work for a minute; its model takes minutes to load."""
    handler = native(directory)
    for _ in range(2):
        assert len(handler.run_inference(['x'], handler.load_model())) == 1
    gc.collect()
    [pid] = starts(directory)
    assert runs(pid)
    assert users() == 1
    [kept] = _model_server._kept.values()
    kept.close()
    assert not runs(pid)


def test_beam_neither_shares_the_model_nor_reloads_it_after_a_time_out() -> None:
    """What it shares, it loses with the process that has loaded it."""
    handler = VLLMCompletionsModelHandler('m')
    handlers: list[ModelHandler[Any, Any, Any]] = [handler, KeyedModelHandler(handler)]
    for each in handlers:
        assert not each.share_model_across_processes()
        assert not each.should_garbage_collect_on_timeout()
    # Else batches could not be collected over bundles.
    lasting = VLLMCompletionsModelHandler('m', max_batch_duration_secs=60)
    assert lasting.share_model_across_processes()


def test_chat_and_completions_of_one_model_share_a_server(directory: Path) -> None:
    handler = native(directory)
    chat = VLLMChatModelHandler('m', env_vars=handler._server_env)
    first, second = handler.load_model(), chat.load_model()
    assert first.status() == second.status()
    assert len(starts(directory)) == 1


@pytest.mark.parametrize(
    'change', [{'A': 'b'}, {'VLLM_LOGGING_LEVEL': 'DEBUG'}, {'CUDA_VISIBLE_DEVICES': '1'}]
)
def test_another_environment_is_another_server(directory: Path, change: dict[str, str]) -> None:
    first, second = native(directory).load_model(), native(directory, **change).load_model()
    assert len(starts(directory)) == 2
    assert all(runs(model.status()[0].pid) for model in (first, second))


def test_identities_are_equal_exactly_where_the_settings_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def identity(config: DynamoRuntimeConfig, **fields: Any) -> str:
        handler = VLLMCompletionsModelHandler(
            MODEL, use_dynamo=True, dynamo_runtime_config=config, **fields
        )
        return handler._runtime().identity

    def config(num_engines: int = 2, **fields: Any) -> DynamoRuntimeConfig:
        return DynamoRuntimeConfig.for_devices(
            num_engines=num_engines, engine_kind='simulated', **fields
        )

    one = identity(config(), max_retries=1, max_in_flight=3)
    monkeypatch.setenv('WORKER_ID', '7')
    assert identity(config()) == one
    monkeypatch.setenv('TRITON_CACHE_AUTOTUNING', '1')  # as an import of vLLM does
    assert identity(config()) == one
    monkeypatch.setattr(sys, 'executable', '/opt/apache/beam-venv/beam-venv-worker-2/bin/python')
    monkeypatch.setattr(sys, 'prefix', '/opt/apache/beam-venv/beam-venv-worker-2')
    installation.cache_clear()
    assert identity(config()) == one
    named = identity(config(), env_vars={'TOKENIZERS_PARALLELISM': 'false'})
    monkeypatch.setenv('TOKENIZERS_PARALLELISM', 'false')  # as a library may at any time
    assert identity(config()) == one
    assert identity(config(), env_vars={'TOKENIZERS_PARALLELISM': 'false'}) == named
    others = [
        named,
        identity(config(3)),
        identity(config(router_mode='round-robin')),
        identity(config(vllm_server_kwargs={'max-num-seqs': 4})),
        identity(config(), env_vars={'A': '1'}),
        identity(config(), env_vars={'TRITON_CACHE_AUTOTUNING': '0'}),
    ]
    assert len({one, *others}) == 7
    monkeypatch.setattr('importlib.metadata.version', lambda _: '0')
    installation.cache_clear()
    assert identity(config()) != one
    installation.cache_clear()


def test_processes_share_one_server_and_it_lives_as_long_as_any_of_them_uses_it(
    directory: Path, other_process: Callable[[], Other]
) -> None:
    model = native(directory).load_model()
    [pid] = starts(directory)
    second, third = other_process(), other_process()
    assert second.server() == third.server() == pid
    assert second.ask('len(native(sys.argv[1]).run_inference(["x"], model))') == '1'
    assert second.ask('model.window()') == str(model.window())
    second.kill()
    model.close()
    assert third.ask('len(native(sys.argv[1]).run_inference(["x"], model))') == '1'
    assert runs(pid)
    third.ask('model.close()')
    wait_until('the server has ended', lambda: not runs(pid))
    assert starts(directory) == [pid]


def test_when_the_process_that_runs_it_is_killed_another_takes_over(
    directory: Path, other_process: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = other_process()
    first = owner.server()
    handler = native(directory)
    model = handler.load_model()
    window = model.window()
    # As libraries do; those who use the same servers go on to look for each other.
    monkeypatch.setenv('HF_HUB_SOMETHING', 'new')
    os.kill(first, signal.SIGSTOP)  # it does not end at TERM, but by the shim's KILL
    owner.kill()
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(handler.run_inference, ['x'], model) for _ in range(4)]
        assert [len(answers.result(60)) for answers in asked] == [1] * 4
    assert not runs(first)
    assert starts(directory) == [first, model.status()[0].pid]
    assert model.window() == window
    assert list(_sharing._hosts) == [model.identity]
    assert handler._runtime().identity != model.identity


def test_a_load_meanwhile_in_another_process_waits_for_the_same_start(
    tmp_path: Path, other_process: Callable[[], Other]
) -> None:
    with ThreadPoolExecutor() as threads:
        own = threads.submit(native(tmp_path).load_model)
        wait_until('it starts', lambda: starts(tmp_path))
        reload = threads.submit(native(tmp_path).load_model)
        other = other_process()
        elsewhere = threads.submit(other.server)
        wait_until('all wait', lambda: users() == 3)
        (tmp_path / 'gate').touch()
        models = own.result(20), reload.result(20)
        assert starts(tmp_path) == [elsewhere.result(20)]
    assert [model.status()[0].pid for model in models] == starts(tmp_path) * 2


def users() -> int:
    [host] = _sharing._hosts.values()
    return host._users


def test_a_start_that_fails_does_so_once_for_all_who_wait(tmp_path: Path) -> None:
    handler = native(tmp_path, EXIT_AT_START='a bad flag')
    descriptors = len(fds_of())
    with ThreadPoolExecutor() as threads:
        loads = [threads.submit(handler.load_model)]
        wait_until('it starts', lambda: starts(tmp_path))
        loads.append(threads.submit(handler.load_model))
        wait_until('both wait', lambda: users() == 2)
        (tmp_path / 'gate').touch()
        for load in loads:
            with pytest.raises(ChildExitedError, match='a bad flag'):
                load.result(20)
    assert len(starts(tmp_path)) == 1
    assert _sharing._hosts == {}
    assert len(fds_of()) <= descriptors


def own_lock() -> Path:
    """The lock of the server that this process runs, or starts."""
    locks = lock_directory().glob('server-*.lock')
    return next(path for path in locks if read_note(path).get('address') == own_door().address)


def own_door() -> Door:
    [host] = _sharing._hosts.values()
    return host._door


def visit(path: Path, waiting: _sharing._Waiting | None = None) -> _sharing.Access | None:
    """As from another process."""
    return _sharing._visit(path, waiting or _sharing._Waiting('m', path))


def test_a_start_that_fails_does_so_for_visitors_too_when_all_others_have_left(
    tmp_path: Path,
) -> None:
    handler = native(tmp_path, EXIT_AT_START='a bad flag')
    with ThreadPoolExecutor() as threads:
        load = threads.submit(handler.load_model)
        wait_until('it starts', lambda: starts(tmp_path))
        visits = [threads.submit(visit, own_lock()) for _ in range(3)]
        wait_until('all wait', lambda: users() == 4)
        (tmp_path / 'gate').touch()
        with pytest.raises(ChildExitedError, match='a bad flag'):
            load.result(20)
        for waiting in visits:
            with pytest.raises(ChildExitedError, match='a bad flag'):
                waiting.result(20)


def test_a_long_start_is_no_reason_to_give_up_when_its_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sharing, 'UNREACHABLE_BOUND_S', 0.5)
    monkeypatch.setattr(_sharing, 'STARTING_ANSWER_S', 0.01)
    with ThreadPoolExecutor() as threads:
        load = threads.submit(native(tmp_path).load_model)
        wait_until('it starts', lambda: starts(tmp_path))
        path, door = own_lock(), own_door()
        waiting = _sharing._Waiting('m', path)
        visiting = threads.submit(visit, path, waiting)
        with pytest.raises(TimeoutError):
            visiting.result(0.8)
        door.close()
        assert visiting.result(20) is None
        waiting.look()
        (tmp_path / 'gate').touch()
        load.result(20).close()


def test_a_process_that_does_not_answer_is_not_waited_for_for_ever(
    directory: Path, other_process: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = other_process()
    other.server()
    monkeypatch.setattr(_sharing, 'UNREACHABLE_BOUND_S', 0.3)
    monkeypatch.setattr('apache_beam_vllm_dynamo._door.ANSWER_BOUND_S', 0.2)
    os.kill(other.process.pid, signal.SIGSTOP)
    with pytest.raises(DevicesBusyError, match=rf'run by process {other.process.pid} '):
        native(directory).load_model()


def test_a_lock_that_cannot_be_written_leaves_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, 'pwrite', no_space)
    with pytest.raises(StartError, match=r'server-\w+.lock, .*No space left.*TMPDIR'):
        native(directory).load_model()
    monkeypatch.undo()
    native(directory).load_model().close()


def test_what_was_given_up_says_why_and_the_next_load_starts_anew(
    directory: Path, other_process: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('apache_beam_vllm_dynamo._restart.RestartPolicy.backoff_s', lambda *_: 0.1)
    handler = native(directory)
    first = handler.load_model()
    other = other_process()
    other.server()
    for _ in range(RESTART_POLICY.max_consecutive_failures + 1):
        pid = wait_until('it runs', lambda: first.status()[0].pid)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until('it has ended', lambda: first.status()[0].pid != pid)  # noqa: B023 - called at once
    wait_until('it is given up', lambda: first.status()[0].state == 'failed')
    with pytest.raises(RuntimeFailedError, match='failed 6 times in a row'):
        first.endpoint()
    wait_until('its directory is gone', lambda: not directories())
    free = DeviceLocks(
        types.SimpleNamespace(description='', ending=False), [Claim('gpu-0', 'GPU 0')]
    )
    free.acquire(5)
    free.release()
    assert 'failed 6 times' in other.ask('failure(model)')
    second = handler.load_model()
    assert len(handler.run_inference(['x'], second)) == 1
    assert first.endpoint() == second.endpoint()  # who holds the old one uses the new one
    first.close()
    assert len(handler.run_inference(['x'], second)) == 1


def test_a_server_that_was_given_up_is_kept_no_longer(directory: Path) -> None:
    handler = native(directory)
    model = handler.load_model()
    handler.run_inference(['x'], model)
    assert list(_model_server._kept.values()) == [model]
    _sharing._hosts[model.identity].runtime.close()
    with pytest.raises(RuntimeFailedError):
        model.endpoint()
    assert not _model_server._kept


def test_the_kept_server_is_one_that_is_open(directory: Path) -> None:
    handler = native(directory)
    first, second = handler.load_model(), handler.load_model()
    handler.run_inference(['x'], first)
    first.close()
    handler.run_inference(['x'], second)
    assert list(_model_server._kept.values()) == [second]


def test_what_beam_shares_ends_when_beam_deletes_it_unless_others_use_it(directory: Path) -> None:
    """A handler of several models has the model that was used least make room for the next."""
    handler = native(directory)

    def shared(tag: str) -> MultiProcessShared[Any]:
        path = str(directory)
        return MultiProcessShared(handler.load_model, tag=tag, path=path, always_proxy=True)

    old, new = shared('sharing_0'), shared('sharing_reload_10')
    old.acquire()
    model: Any = new.acquire()
    assert users() == 2
    old.unsafe_hard_delete()
    assert users() == 1
    [pid] = starts(directory)
    assert runs(pid)
    assert len(handler.run_inference(['x'], model)) == 1
    new.release(model)
    del model  # until then a thread that has answered it keeps what it asked last
    wait_until('the server has ended', lambda: not runs(pid))


def several_models(
    directories_of: dict[str, Path], **arguments: Any
) -> KeyedModelHandler[str, Any, Any, Any]:
    mappings = [KeyModelMapping([name], native(path)) for name, path in directories_of.items()]
    return KeyedModelHandler(mappings, **arguments)


def directories_for(tmp_path: Path, *names: str) -> dict[str, Path]:
    """A directory for the notes of each model's starts, none of which has to wait."""
    found = {name: tmp_path / name for name in names}
    for path in found.values():
        path.mkdir(exist_ok=True)
        (path / 'gate').touch()
    return found


def test_of_several_models_the_one_that_makes_room_ends(tmp_path: Path) -> None:
    """Beam drops it, in the process that has loaded it, and its GPU is for the next."""
    places = directories_for(tmp_path, 'a', 'b')
    seen = []
    handler = several_models(places, max_models_per_worker_hint=1)
    do_fn = _RunInferenceDoFn(handler, time, '', model_tag='makes room')
    do_fn.setup()
    for name in 'aba':
        do_fn._run_inference([(name, 'x')], None)
        seen.append({model: sum(map(runs, starts(path))) for model, path in places.items()})
    assert seen == [{'a': 1, 'b': 0}, {'a': 0, 'b': 1}, {'a': 1, 'b': 0}]


# Asks one of several models that another process has loaded, before and after its server died.
ASKS_ONE_OF_SEVERAL = """
import os, pathlib, signal, sys, time
from apache_beam.ml.inference.base import _RunInferenceDoFn
from tests.test_sharing import directories_for, several_models, starts
places = directories_for(pathlib.Path(sys.argv[1]), 'a', 'b')
do_fn = _RunInferenceDoFn(several_models(places), time, '', model_tag=sys.argv[2])
do_fn.setup()
do_fn._run_inference([('a', 'x')], None)
os.kill(starts(places['a'])[0], signal.SIGKILL)
print(len(do_fn._run_inference([('a', 'x')], None)), len(starts(places['a'])))
"""


def test_one_of_several_models_outlives_its_servers_death_in_another_process_too(
    tmp_path: Path,
) -> None:
    """There Beam gives a proxy for each batch, and takes it away again."""
    places = directories_for(tmp_path, 'a', 'b')
    tag = 'outlives its server'
    do_fn = _RunInferenceDoFn(several_models(places), time, '', model_tag=tag)
    do_fn.setup()
    do_fn._run_inference([('a', 'x')], None)
    with ProcessTree() as tree:
        asked = subprocess.run(
            (sys.executable, '-c', ASKS_ONE_OF_SEVERAL, str(tmp_path), tag),
            capture_output=True, text=True, cwd=ROOT, env={**os.environ, **tree.env}, check=False,
        )  # fmt: skip
    assert asked.stdout.split() == ['1', '2'], asked.stderr


def test_two_steps_with_one_handler_on_the_same_gpu_share_its_server(directory: Path) -> None:
    collected.clear()
    handler = native(directory)
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        _ = (
            pipeline
            | beam.Create(['one', 'two'])
            | 'first' >> RunInference(handler)
            | 'prompts' >> beam.Map(prompt_of)
            | 'second' >> RunInference(native(directory))
            | 'prompts again' >> beam.Map(prompt_of)
            | 'collect' >> beam.Map(collect)
        )
    assert sorted(collected) == ['one', 'two']
    assert len(starts(directory)) == 1


def prompt_of(result: PredictionResult) -> str:
    return str(result.example)


def test_steps_with_other_settings_on_the_same_gpus_are_refused_with_both_named() -> None:
    env = {'PYTHONPATH': FAKE_MODULES, 'CUDA_VISIBLE_DEVICES': '0,1'}

    def handler(model: str, *devices: str) -> VLLMCompletionsModelHandler:
        config = DynamoRuntimeConfig.for_devices(gpu_devices=devices, discovery='file')
        return VLLMCompletionsModelHandler(
            model, use_dynamo=True, dynamo_runtime_config=config, env_vars=env
        )

    with ThreadPoolExecutor() as threads:
        begun = threads.submit(handler('this', '0', '1').load_model)
        host = wait_until('it starts', lambda: next(iter(_sharing._hosts.values()), None))
        assert host is not None
        wait_until('its engines run', lambda: len(host.runtime.statuses()) == 4)
        with pytest.raises(DevicesBusyError) as raised:
            handler('that', '1').load_model()
        host.runtime.close()
        with pytest.raises(StartError, match='given up'):
            begun.result(30)
    said = str(raised.value)
    assert "GPU 1 is in use by model 'this' (Dynamo, 2 engines, kv) of this process" in said
    assert "model 'that' (Dynamo, 1 engine, kv) needs it" in said
    assert 'gpu_devices' in said


def test_a_start_that_fails_after_the_first_does_so_once_for_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = types.SimpleNamespace(
        window=1, kv_caches=1, endpoint=Mock(side_effect=LineLostError), leave=Mock()
    )
    monkeypatch.setattr(_sharing, '_find', Mock(return_value=ended))
    place = _sharing.Place(Mock())
    begun, gate = threading.Event(), threading.Event()

    def fail(*_: object) -> None:
        begun.set()
        gate.wait(20)
        raise StartError('a bad flag')

    find = Mock(side_effect=fail)
    monkeypatch.setattr(_sharing, '_find', find)
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(place.endpoint) for _ in range(3)]
        begun.wait(20)
        wait_until('all have asked', lambda: ended.endpoint.call_count == 3)
        time.sleep(0.1)  # to the lock, where nothing can be seen of them
        gate.set()
        for endpoint in asked:
            with pytest.raises(StartError, match='a bad flag'):
                endpoint.result(20)
    assert find.call_count == 1
    with pytest.raises(StartError, match='a bad flag'):
        place.endpoint()
    assert find.call_count == 2  # who asks later has it tried again


def test_one_that_cannot_be_reached_is_waited_for_with_an_end(
    directory: Path, other_process: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another network namespace."""
    other = other_process()
    other.server()
    [path] = (
        path
        for path in lock_directory().glob('server-*.lock')
        if read_note(path).get('pid') == other.process.pid
    )
    path.write_text(json.dumps(read_note(path) | {'address': '\0nobody'}))
    monkeypatch.setattr(_sharing, 'UNREACHABLE_BOUND_S', 0.3)
    with pytest.raises(DevicesBusyError, match=rf'run by process {other.process.pid} .*network'):
        native(directory).load_model()


def test_a_fork_of_the_process_that_runs_it_finds_it_by_the_door(directory: Path) -> None:
    handler = native(directory)
    model = handler.load_model()
    pid = os.fork()
    if not pid:
        answers = handler.run_inference(['x'], model)
        os._exit(0 if len(answers) == 1 and model.status() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(starts(directory)) == 1
    assert len(handler.run_inference(['x'], model)) == 1


def test_who_was_silent_for_long_is_joined_again(
    directory: Path, other_process: Callable[[], Other], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would end the server with its own use of it, although others use it."""
    other = other_process()
    pid = other.server()
    handler = native(directory)
    model = handler.load_model()
    monkeypatch.setattr('apache_beam_vllm_dynamo._door.ANSWER_BOUND_S', 0.5)
    other.process.send_signal(signal.SIGSTOP)
    assert model.status() == ()
    other.process.send_signal(signal.SIGCONT)
    assert wait_until('it is joined again', model.status)[0].pid == pid
    other.ask('model.close()')
    assert len(handler.run_inference(['x'], model)) == 1
    assert starts(directory) == [pid]


def test_a_fork_uses_no_server_of_its_parents(directory: Path) -> None:
    model = native(directory).load_model()
    pid = os.fork()
    if not pid:
        host = next(iter(_sharing._hosts.values()))
        model.close()  # as at its exit
        os._exit(0 if not host.admit() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert runs(model.status()[0].pid)


class Echo:
    """Answers some questions."""

    left = 0

    def answer(self, question: str) -> object:
        if question == 'fail':
            raise StartError('as asked')
        if question == 'fail badly':
            raise Unsendable(lambda: None)
        return question

    def leave(self) -> None:
        Echo.left += 1


class Unsendable(Exception):  # noqa: N818
    """Cannot be pickled."""


@pytest.fixture
def door() -> Iterator[Door]:
    before = set(threading.enumerate())
    Echo.left = 0
    door = Door(Echo, 'test')
    yield door
    door.close()
    wait_until('its threads have ended', lambda: set(threading.enumerate()) <= before)


def test_a_question_is_answered_or_raises_what_was_raised(door: Door) -> None:
    caller = Caller(door.address)
    assert caller.ask('x' * 1_000_000) == 'x' * 1_000_000
    with pytest.raises(StartError, match='as asked'):
        caller.ask('fail')
    with pytest.raises(RuntimeError, match='Unsendable'):
        caller.ask('fail badly')
    caller.close()
    caller.close()
    wait_until('it has left', lambda: Echo.left == 1)
    with pytest.raises(LineLostError):
        caller.ask('more')


def test_a_closed_door_cuts_those_off_who_are_inside_and_lets_nobody_in(door: Door) -> None:
    caller = Caller(door.address)
    assert caller.ask('x') == 'x'
    door.close()
    with pytest.raises(LineLostError):
        caller.ask('x')
    with pytest.raises(LineLostError):
        Caller(door.address)
    caller.close()


def test_a_lack_of_descriptors_does_not_close_a_door(door: Door) -> None:
    first = Caller(door.address)
    assert first.ask('x') == 'x'
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as other:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            other.connect(door.address)  # gets what accept() had reserved; the next finds none
            wait_until('it is in', lambda: door._lines is not None and len(door._lines) == 2)
            assert first.ask('x') == 'x'
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    second = Caller(door.address)
    assert second.ask('x') == 'x'
    first.close()
    second.close()


def test_a_door_may_be_closed_by_a_garbage_collection_at_any_moment(door: Door) -> None:
    assert ends_under(door._lines_lock, door.close)


def test_another_users_process_is_not_let_in(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(door.address)
    caller.ask('x')  # it is in, whatever is said of its user from now on
    monkeypatch.setattr(os, 'getuid', lambda: -2)
    with pytest.raises(LineLostError, match='another user'):
        Caller(door.address)
    monkeypatch.undo()
    assert caller.ask('x') == 'x'
    caller.close()


def failure(model: _VLLMModelServer) -> str:
    """What the endpoint raises."""
    try:
        return model.endpoint()
    except RuntimeFailedError as error:
        return error.reason
