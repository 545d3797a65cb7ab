"""Real stacks on simulated engines, and what a test asks about them."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    _clients,
    _marker,
    _model_server,
    _private_directory,
)
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from tests.support.processes import wait_until
from tools.small_model import TOKENIZER_DIRECTORY

MODEL = str(TOKENIZER_DIRECTORY)
FAKE_MODULES = str(pathlib.Path(__file__).parents[1] / 'fakes' / 'modules')

# 1 ms a request, instead of the timing of a GPU.
FAST = {'speedup-ratio': 1000}

_OURS = re.compile(r'supervisor|probe|reader|vllm-dynamo-client|share')


def simulated(num_engines: int = 2, **fields: Any) -> DynamoRuntimeConfig:
    """A config of engines that answer at once."""
    fields.setdefault('simulation_kwargs', FAST)
    fields.setdefault('start_timeout_secs', 60)
    return DynamoRuntimeConfig.for_devices(
        num_engines=num_engines, engine_kind='simulated', **fields
    )


@contextlib.contextmanager
def started(
    config: DynamoRuntimeConfig, env: dict[str, str] | None = None
) -> Iterator[_DynamoLocalRuntime]:
    """A runtime that serves, closed at the end."""
    runtime = _DynamoLocalRuntime(MODEL, config, env=env)
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.close()


def complete(base_url: str, prompt: str, **arguments: Any) -> dict[str, Any]:
    """One completion, straight from the frontend."""
    body = {'model': MODEL, 'prompt': prompt, 'max_tokens': 2, **arguments}
    request = urllib.request.Request(
        f'{base_url}/v1/completions',
        json.dumps(body).encode(),
        {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def metric(base_url: str, name: str, **labels: str) -> float:
    """The sum of a frontend metric over all series that have ``labels``."""
    with urllib.request.urlopen(f'{base_url}/metrics', timeout=20) as response:
        lines = response.read().decode().splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(' ', 1)[1])
        for line in lines
        if re.match(rf'{name}[{{ ]', line) and all(label in line for label in wanted)
    )


def pids_of_children() -> set[int]:
    """Every process that was started for this one, at any depth, and lives."""
    ours = f'{_marker.MARKER}={os.getpid()}.'.encode()
    found = set()
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
        with contextlib.suppress(OSError):
            if ours in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def directories() -> set[pathlib.Path]:
    """The private directories of starts on this machine."""
    return set(pathlib.Path(tempfile.gettempdir()).glob(f'{_private_directory.PREFIX}*'))


@contextlib.contextmanager
def nothing_left_on_this_machine() -> Iterator[None]:
    """Ends all servers after the block; no process, directory or thread of ours may be left."""
    before = directories()
    yield
    _clients.close_all()
    _model_server.close_all()
    wait_until('no child is left', lambda: not pids_of_children())
    wait_until('no directory is left', lambda: directories() <= before)
    wait_until('no thread is left', lambda: not _our_threads())


def _our_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if _OURS.search(t.name)]
