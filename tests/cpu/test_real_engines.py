"""Real vLLM engines on two CPU cores: the same model through every kind of server."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    OpenAIChatMessage,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
)
from tests.support.processes import wait_until
from tests.support.real_engines import MODEL, ON_REAL_ENGINES
from tests.support.stacks import metric, pids_of_children

pytestmark = ON_REAL_ENGINES

# float32: the CPU build of vLLM gives wrong text in bfloat16 without compilation.
FLAGS: dict[str, Any] = {
    'dtype': 'float32',
    'enforce-eager': True,
    'max-model-len': 2048,
    'max-num-seqs': 16,
}
ENV = {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1'}
CPU_ENV = {**ENV, 'VLLM_CPU_OMP_THREADS_BIND': '0'}
GREEDY = {'temperature': 0, 'max_tokens': 12}
PROMPTS = [
    'The capital of France is',
    'Water boils at a temperature of',
    'Once upon a time there was a',
    'def add(a, b):\n    return',
]
# CPU engines cache in blocks of 128 tokens; this is several.
DOCUMENT = 'The lighthouse keeper wrote down the wind, the tide and the ships of the day. ' * 30
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}The word is:"


def engines(number: int, **fields: Any) -> DynamoRuntimeConfig:
    spec = DynamoVLLMEngineSpec(vllm_server_kwargs=FLAGS, env=ENV)
    return DynamoRuntimeConfig(
        (spec,) * number, engine_kind='cpu', start_timeout_secs=300, **fields
    )


def native(**flags: Any) -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler(MODEL, {**FLAGS, **flags}, env_vars=ENV)


def dynamo(config: DynamoRuntimeConfig) -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler(MODEL, use_dynamo=True, dynamo_runtime_config=config)


def ask(handler: Any, model: Any, elements: list[Any]) -> list[Any]:
    """The openai objects that come back."""
    return [result.inference for result in handler.run_inference(elements, model, GREEDY)]


def texts(handler: VLLMCompletionsModelHandler, model: Any, prompts: list[str]) -> list[str]:
    return [completion.choices[0].text for completion in ask(handler, model, prompts)]


@pytest.fixture
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a chat template that is not the model's own."""
    path = tmp_path_factory.mktemp('template') / 'template.jinja'
    path.write_text(TEMPLATE)
    return str(path)


def without_template(directory: pathlib.Path) -> str:
    """The model as a base model comes: prompts can be put to it, chats can not."""
    for path in pathlib.Path(MODEL).iterdir():
        if path.name not in ('chat_template.jinja', 'tokenizer_config.json'):
            (directory / path.name).symlink_to(path)
    settings = json.loads(pathlib.Path(MODEL, 'tokenizer_config.json').read_text())
    settings.pop('chat_template', None)
    (directory / 'tokenizer_config.json').write_text(json.dumps(settings))
    return str(directory)


def assert_the_template_of_the_user_is_used(handler: VLLMChatModelHandler, model: Any) -> None:
    [answer] = ask(handler, model, [[OpenAIChatMessage('user', 'Hello')]])
    # "Hello The word is:" is five or six tokens; the model's own template has thirty.
    assert answer.usage.prompt_tokens < 12


def test_greedy_completions_do_not_depend_on_the_server(
    template: str, tmp_path: pathlib.Path
) -> None:
    """Native vLLM with a chat template of the user, and one engine of a model that has none."""
    chat = VLLMChatModelHandler(MODEL, template, FLAGS, env_vars=ENV)
    model = chat.load_model()
    assert_the_template_of_the_user_is_used(chat, model)
    of_native = texts(native(), model, PROMPTS)
    model.close()

    base = without_template(tmp_path)
    handler = VLLMCompletionsModelHandler(base, FLAGS, use_dynamo=True, env_vars=CPU_ENV)
    model = handler.load_model()
    of_dynamo = texts(handler, model, PROMPTS)
    model.close()

    assert of_native == of_dynamo
    assert 'Paris' in of_native[0]


def test_two_engines_share_prefixes_stay_on_loopback_and_one_that_hangs_is_replaced(
    template: str,
) -> None:
    config = engines(2, hang_timeout_secs=10)
    chat = VLLMChatModelHandler(MODEL, template, use_dynamo=True, dynamo_runtime_config=config)
    model = chat.load_model()
    assert_the_template_of_the_user_is_used(chat, model)

    handler = dynamo(config)
    [first] = ask(handler, model, [DOCUMENT + 'Who?'])
    [second] = ask(handler, model, [DOCUMENT + 'Where?'])
    assert first.usage.prompt_tokens > 384
    assert second.usage.prompt_tokens_details.cached_tokens >= 384
    wait_until(
        'KV events are applied',
        lambda: metric(model.endpoint(), 'dynamo_component_kv_cache_events_applied', status='ok'),
    )
    assert listeners_off_loopback() == []

    with answering(handler, model) as hung:
        inflight = 'dynamo_frontend_inflight_requests'
        wait_until('requests are under way', lambda: metric(model.endpoint(), inflight) > 12)
        os.kill(hung, signal.SIGSTOP)
    assert metric(model.endpoint(), 'dynamo_frontend_model_migration_total') > 0
    assert [s.restarts for s in model.status() if 'engine' in s.label] in ([1, 0], [0, 1])


@contextlib.contextmanager
def answering(handler: VLLMCompletionsModelHandler, model: Any) -> Iterator[int]:
    """All requests of the block are answered although it stops a process that has a model.

    Gives the id of that process, whose parent goes on to say that it lives.
    """
    results: list[Any] = []
    prompts = [f'{number} green bottles' for number in range(24)]
    arguments = {'temperature': 0, 'max_tokens': 80, 'ignore_eos': True}
    asking = threading.Thread(
        target=lambda: results.extend(handler.run_inference(prompts, model, arguments))
    )
    asking.start()
    try:
        yield max(pid for pid in pids_of_children() if b'EngineCore' in command_line(pid))
    finally:
        asking.join(600)
    assert [result.example for result in results] == prompts
    assert {result.inference.usage.completion_tokens for result in results} == {80}
    [error] = [status.last_error for status in model.status() if status.last_error]
    assert error.startswith('says for 10 s that it is not well')


def command_line(pid: int) -> bytes:
    return pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()


def listeners_off_loopback() -> list[str]:
    ours = pids_of_children()
    listed = subprocess.run(['ss', '-ltnpH'], capture_output=True, text=True, check=True).stdout
    of_ours = [
        line
        for line in listed.splitlines()
        if any(int(pid) in ours for pid in re.findall(r'pid=(\d+)', line))
    ]
    assert of_ours
    return [line for line in of_ours if line.split()[3].rpartition(':')[0] != '127.0.0.1']


def test_the_native_server_runs_data_parallel_and_is_replaced_when_a_rank_hangs() -> None:
    handler = VLLMCompletionsModelHandler(
        MODEL,
        {**FLAGS, 'data-parallel-size': 2},
        hang_timeout_secs=10,
        env_vars={**ENV, 'VLLM_CPU_OMP_THREADS_BIND': '0|1'},
    )
    model = handler.load_model()
    assert model.window() == 32
    assert 'Paris' in texts(handler, model, PROMPTS)[0]

    with answering(handler, model) as hung:
        rank = re.search(rb'DP(\d)', command_line(hung))
        assert rank is not None
        running = 'vllm:num_requests_running', rank[1].decode()
        wait_until(
            'requests are under way',
            lambda: metric(model.endpoint(), running[0], engine=running[1]) > 4,
        )
        os.kill(hung, signal.SIGSTOP)


OWNER = """
import sys
from tests.cpu.test_real_engines import dynamo, engines
model = dynamo(engines(1)).load_model()
print('serving', flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_a_killed_owner() -> None:
    token = f'{os.getpid()}-owner'
    owner = subprocess.Popen(
        [sys.executable, '-c', OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, 'TEST_OWNER': token},
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == 'serving\n'
        names = [name for name, _ in processes_with(token)]
        assert any('VLLM::' in name for name in names)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        wait_until('all processes are gone', lambda: not processes_with(token), timeout_s=10)
    finally:
        owner.kill()
        owner.wait()
        for _, pid in processes_with(token):
            os.kill(pid, signal.SIGKILL)
        for stream in (owner.stdin, owner.stdout):
            if stream is not None:
                stream.close()


def processes_with(token: str) -> list[tuple[str, int]]:
    """Name and id of every process that has the token in its environment, ours apart."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*'):
        try:
            if f'TEST_OWNER={token}'.encode() in (path / 'environ').read_bytes():
                name = (path / 'cmdline').read_bytes().decode(errors='replace')
                found.append((name, int(path.name)))
        except OSError:
            continue
    return found
