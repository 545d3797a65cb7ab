"""The examples, run as a user runs them: programs with arguments, files in and files out."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from apache_beam_vllm_dynamo import ConfigurationError
from examples import _demo_prompts, vllm_text_completion
from tests.support.processes import ROOT, ProcessTree
from tools.small_model import FULL_DIRECTORY, TOKENIZER_DIRECTORY

EXAMPLE = ('-m', 'examples.vllm_text_completion')
SIMULATED = (
    '--model', str(TOKENIZER_DIRECTORY), '--use_dynamo', '--engine_kind', 'simulated',
    '--dynamo_engines', '2', '--max_tokens', '4',
)  # fmt: skip
COLUMNS = {'completion', 'finish_reason', 'prompt_tokens', 'cached_tokens', 'completion_tokens'}
RUN_TIMEOUT_S = 90.0  # they take five seconds each on an idle machine
CPU_RUN_TIMEOUT_S = 900.0  # and this one a minute


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    """Everything that a program starts; the test fails if any of it is left."""
    with ProcessTree() as processes:
        yield processes
        processes.wait_until_gone()


def run(
    tree: ProcessTree, *argv: str, timeout_s: float = RUN_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, *argv),
        cwd=ROOT,
        env={**os.environ, **tree.env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def answers(tree: ProcessTree, directory: pathlib.Path, *argv: str) -> list[dict[str, Any]]:
    """The output of a run that must succeed."""
    result = run(tree, *argv, '--output', str(directory / 'answers'))
    assert result.returncode == 0, result.stderr
    shards = list(directory.glob('answers-?????-of-?????.jsonl'))
    assert shards, 'no output'
    return [json.loads(line) for path in shards for line in path.read_text().splitlines()]


def test_the_file_runs_by_its_path_and_answers_the_built_in_prompts(
    tree: ProcessTree, tmp_path: pathlib.Path
) -> None:
    """Every prompt has an answer with its finish reason and token counts, and no error."""
    rows = answers(tree, tmp_path, 'examples/vllm_text_completion.py', *SIMULATED)
    assert sorted(row['prompt'] for row in rows) == sorted(vllm_text_completion.PROMPTS)
    assert 'What is the capital of France?' in vllm_text_completion.PROMPTS
    for row in rows:
        assert row.keys() == {'prompt', 'error'} | COLUMNS
        assert row['error'] is None
        assert row['completion']
        assert row['finish_reason'] == 'length'
        assert row['completion_tokens'] == 4
        assert row['prompt_tokens'] > row['cached_tokens'] >= 0


def test_each_line_of_a_text_file_is_a_prompt(tree: ProcessTree, tmp_path: pathlib.Path) -> None:
    """No line is lost or doubled, blank ones are skipped, and files may be a pattern."""
    prompts = [f'Line {i}, "quoted", with  spaces and ünïcode' for i in range(40)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(prompts[:30]) + '\n   \n')
    (tmp_path / 'b.txt').write_text('\n'.join(prompts[30:]))
    rows = answers(tree, tmp_path, *EXAMPLE, *SIMULATED, '--input', str(tmp_path / '*.txt'))
    assert sorted(row['prompt'] for row in rows) == sorted(prompts)
    assert [row['error'] for row in rows] == [None] * 40


def test_no_line_of_a_jsonl_file_vanishes_whatever_is_wrong_with_it(
    tree: ProcessTree, tmp_path: pathlib.Path
) -> None:
    """Other keys are kept beside the answer; what has none is there with its error.

    The workers are processes of their own here, as on a cluster, where nothing of the main
    program is known but what was sent along.
    """
    lines = [
        '{"id": 0, "prompt": "Hello", "error": "of an earlier run", "tags": ["a", {"b": null}]}',
        '{"id": 1, "prompt": [1, 2, 3]}',
        '{"id": 2, "prompt": ""}',
        '{"id": 3, "prompt": 5}',
        '{"id": 4, "text": "no prompt"}',
        '["id", 5]',
        'id 6',
        '{"id": 7, "messages": [{"role": "user", "content": "Hi"}]}',
        r'{"id": 8, "prompt": "half a pair: \ud800"}',
    ]
    (tmp_path / 'in.jsonl').write_text('\n'.join(lines))
    found = answers(
        tree, tmp_path, *EXAMPLE, *SIMULATED, '--input', str(tmp_path / 'in.jsonl'),
        '--runner', 'FnApiRunner', '--direct_running_mode', 'multi_processing',
        '--direct_num_workers', '2', '--save_main_session',
    )  # fmt: skip
    assert len(found) == len(lines)
    rows = {row['id']: row for row in found if 'id' in row}
    assert rows.keys() == {0, 1, 2, 3}
    assert rows[0]['tags'] == ['a', {'b': None}]
    for i in (0, 1):
        assert rows[i]['error'] is None
        assert rows[i]['completion_tokens'] == 4
    for i in (2, 3):
        assert rows[i]['error'].startswith('invalid_request')
    unreadable = [row for row in found if 'line' in row]
    assert sorted(row['line'] for row in unreadable) == sorted(lines[4:])
    for row in [rows[2], rows[3], *unreadable]:
        assert row['error']
        assert {row[column] for column in COLUMNS} == {None}


def test_chat_takes_messages_and_prompts(tree: ProcessTree, tmp_path: pathlib.Path) -> None:
    """A prompt is a conversation of one message; the file may be compressed."""
    messages = [
        {'role': 'system', 'content': 'Be brief.'},
        {'role': 'user', 'content': 'Hello'},
    ]
    lines = [json.dumps({'messages': messages}), json.dumps({'prompt': 'Hello'})]
    with gzip.open(tmp_path / 'in.jsonl.gz', 'wt') as file:
        file.write('\n'.join(lines))
    rows = answers(
        tree, tmp_path, *EXAMPLE, *SIMULATED, '--chat', '--input', str(tmp_path / 'in.jsonl.gz')
    )
    assert [row['error'] for row in rows] == [None, None]
    [conversation] = [row for row in rows if 'messages' in row]
    [prompt] = [row for row in rows if 'prompt' in row]
    assert conversation['messages'] == messages
    # The chat template surrounds the one word with tokens.
    assert prompt['prompt_tokens'] > 5
    assert conversation['completion']


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--dynamo_engines', '2'], '--dynamo_engines needs --use_dynamo'),
        (['--dynamo_router_mode', 'kv'], '--dynamo_router_mode needs --use_dynamo'),
        (['--engine_kind', 'simulated'], '--engine_kind needs --use_dynamo'),
        (['--chat_template', 'x.jinja'], '--chat_template needs --chat'),
        (['--max_tokens', '0', '--use_dynamo'], "'max_tokens' is 0"),
        (['--use_dynamo', '--vllm_max_num_seqs', '0'], "'max-num-seqs'"),
        (['--use_dynamo', '--dynamo_engines', '0'], 'num_engines is 0'),
        (['--use_dynamo', '--dynamo_gpu_devices', '0,0'], "'0' twice"),
        (
            ['--use_dynamo', '--dynamo_engines', '2', '--dynamo_gpu_devices', '0,1,2'],
            'give 2 devices',
        ),
        (
            ['--use_dynamo', '--dynamo_router_mode', 'round-robin', '--dynamo_kv_event_mode',
             'zmq'],
            "use router_mode='kv' or kv_event_mode='disabled'",
        ),
        (['--input', '{}/missing.txt'], 'there is no file'),
        (['--input', '{}/no-prompt.jsonl'], 'it must be a JSON object with "prompt"'),
        (['--input', '{}/messages.jsonl'], '"messages" needs --chat'),
        (['--input', '{}/no-prompt.jsonl', '--chat'], 'object with "messages" or "prompt"'),
        (['--input', '{}/no-json.jsonl'], 'the first line of'),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_before_anything_starts(
    argv: list[str],
    message: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong argument, or a first line without a prompt, ends in a message and status 2."""
    (tmp_path / 'no-prompt.jsonl').write_text('\n{"text": "Hello"}\n')
    (tmp_path / 'messages.jsonl').write_text('{"messages": []}\n')
    (tmp_path / 'no-json.jsonl').write_text('Hello\n')
    monkeypatch.setattr('apache_beam.Pipeline', None)
    output = tmp_path / 'answers'
    argv = [argument.replace('{}', str(tmp_path)) for argument in argv]
    with pytest.raises(SystemExit) as exit_info:
        vllm_text_completion.main(['--model', 'm', '--output', str(output), *argv])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob('answers*'))


def test_a_wrong_argument_is_shown_without_a_traceback(tree: ProcessTree) -> None:
    result = run(tree, *EXAMPLE, '--model', 'm', '--output', 'o', '--dynamo_engines', '2')
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith('error: --dynamo_engines needs --use_dynamo.')
    assert 'Traceback' not in result.stderr


@pytest.mark.parametrize(
    ('argv', 'devices'),
    [
        ('--dynamo_engines 2', [('0',), ('1',)]),
        ('--dynamo_gpu_devices 3,1', [('3',), ('1',)]),
        ('--dynamo_engines 2 --dynamo_gpu_devices 0,1,2,3', [('0', '1'), ('2', '3')]),
        ('--dynamo_engines 1 --dynamo_gpu_devices GPU-a,GPU-b', [('GPU-a', 'GPU-b')]),
    ],
)
def test_the_gpus_are_shared_out_in_order(argv: str, devices: list[tuple[str, ...]]) -> None:
    args = vllm_text_completion.make_parser().parse_args(
        ['--model', 'm', '--output', 'o', '--use_dynamo', *argv.split()]
    )
    config = vllm_text_completion.make_config(args, {'max-num-seqs': 8})
    assert [spec.gpu_devices for spec in config.listed_engines] == devices
    assert {spec.max_num_seqs for spec in config.listed_engines} == {8}
    assert (config.engine_kind, config.router_mode, config.kv_event_mode) == ('gpu', 'kv', 'zmq')


def test_the_engines_are_counted_on_the_worker_where_no_number_is_given() -> None:
    args = vllm_text_completion.make_parser().parse_args(
        ['--model', 'm', '--output', 'o', '--use_dynamo']
    )
    with pytest.raises(ConfigurationError, match='counted on the worker'):
        _ = vllm_text_completion.make_config(args, {}).listed_engines


def test_the_demo_shows_each_answer_and_what_each_engine_did(tree: ProcessTree) -> None:
    """Its table adds up, prompts share what is cached, and nothing else is on the screen."""
    result = run(
        tree, '-m', 'examples.demo', '--model', str(TOKENIZER_DIRECTORY),
        '--engine_kind', 'simulated',
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert 'engine 1 of 2 ready after' in result.stdout
    for row in _demo_prompts.rows():
        assert row['question'] in result.stdout
    check_table(result.stdout)
    assert 'Traceback' not in result.stdout + result.stderr
    assert 'WARNING' not in result.stdout + result.stderr


def test_the_demo_says_once_why_the_engines_did_not_start(
    tree: ProcessTree, tmp_path: pathlib.Path
) -> None:
    result = run(
        tree, '-m', 'examples.demo', '--model', str(tmp_path), '--engine_kind', 'simulated'
    )
    assert result.returncode == 1
    failures = [line for line in result.stdout.splitlines() if 'FAILED: ' in line]
    assert len(failures) == 1
    assert re.search(r'FAILED: model: .*config\.json cannot be read', failures[0])
    assert not result.stderr


@pytest.mark.cpu
@pytest.mark.timeout(CPU_RUN_TIMEOUT_S + 30)
def test_the_demo_on_real_engines_knows_the_capital_of_france(tree: ProcessTree) -> None:
    if importlib.util.find_spec('vllm') is None:
        pytest.skip('vLLM is missing from this environment: make test-cpu has it')
    if not FULL_DIRECTORY.exists():
        pytest.skip('the weights of the model are missing: make env-cpu makes them')
    result = run(
        tree, '-m', 'examples.demo', '--model', str(FULL_DIRECTORY), '--engine_kind', 'cpu',
        timeout_s=CPU_RUN_TIMEOUT_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert 'The capital of France is Paris.' in result.stdout
    check_table(result.stdout)


def check_table(output: str) -> None:
    """Two engines served requests, the last line is their sum, and some prompts were cached."""
    pattern = r'^(\d{6,}|together) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$'
    table = {
        name: [int(number.replace(',', '')) for number in numbers]
        for name, *numbers in re.findall(pattern, output, re.MULTILINE)
    }
    together = table.pop('together')
    assert len(table) == 2, output
    assert [sum(column) for column in zip(*table.values(), strict=True)] == together
    assert together[0] == len(_demo_prompts.rows())
    assert together[2] > together[1] / 4  # of all prompt tokens; about half is usual
    assert re.search(r'^\d+\.\d tokens per second generated', output, re.MULTILINE)
