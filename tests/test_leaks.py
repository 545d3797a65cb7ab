"""The look at what tests leave behind finds what it is there for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support import leaks
from tests.support.leaks import nothing_leaks, processes_with
from tests.support.processes import ROOT, wait_until


@contextlib.contextmanager
def child() -> Iterator[None]:
    with subprocess.Popen(('sleep', '60')) as process:
        yield
        process.kill()


@contextlib.contextmanager
def thread() -> Iterator[None]:
    enough = threading.Event()
    ours = threading.Thread(target=enough.wait, name='vLLM runtime supervisor probe 3')
    ours.start()
    yield
    enough.set()
    ours.join()


@contextlib.contextmanager
def pipe() -> Iterator[None]:
    ends = os.pipe()
    yield
    for end in ends:
        os.close(end)


@contextlib.contextmanager
def file() -> Iterator[None]:
    with tempfile.NamedTemporaryFile():
        yield


# In a process without Beam's own sockets.
LIVES = """
import os, threading
from apache_beam_vllm_dynamo import VLLMCompletionsModelHandler, _clients
from tests.support.processes import fds_of
from tests.support.stacks import MODEL, simulated

handler = VLLMCompletionsModelHandler(MODEL, use_dynamo=True, dynamo_runtime_config=simulated(1))
for _ in range(2):
    model = handler.load_model()
    [result] = handler.run_inference(['one'], model, {'max_tokens': 1})
    assert result.inference.usage.completion_tokens == 1
    model.close()
    _clients.close_all()
    kinds = sorted(leads_to.partition('[')[0] for leads_to in fds_of().values())
    print(kinds, sorted(thread.name for thread in threading.enumerate()))
"""


def test_the_life_of_a_stack_leaves_no_descriptor_of_any_kind_and_no_thread() -> None:
    ran = subprocess.run(
        (sys.executable, '-c', LIVES), cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, second = ran.stdout.splitlines()
    assert first == second
    assert first.endswith(" ['MainThread']")


@pytest.mark.parametrize(
    ('leak', 'said'),
    [
        pytest.param(child, r'children: \[\d+\]', id='a child'),
        pytest.param(thread, r"threads: \['vLLM runtime supervisor probe 3'\]", id='a thread'),
        pytest.param(pipe, r"descriptors: \['pipe', 'pipe'\]", id='a pipe'),
        pytest.param(file, r"descriptors: \['/.*'\]", id='a file'),
    ],
)
def test_what_is_left_behind_fails_with_its_name(
    leak: Callable[[], contextlib.AbstractContextManager[None]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaks, 'PATIENCE_S', 0.1)
    with (
        contextlib.ExitStack() as afterwards,
        pytest.raises(AssertionError, match=said),
        nothing_leaks(),
    ):
        afterwards.enter_context(leak())


def test_a_process_that_nobody_is_the_parent_of_is_found_by_its_directory() -> None:
    directory = tempfile.gettempdir()
    assert processes_with(directory) == []
    # The shell ends at once, and what it has started lives on.
    command = ('sh', '-c', 'sleep 60 >/dev/null 2>&1 & echo $!')
    orphan = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    wait_until('it is found', lambda: processes_with(directory) == ['sleep 60 '])
    os.kill(orphan, signal.SIGKILL)
    wait_until('it has ended', lambda: not processes_with(directory))
