"""One run of one arm: the arms' settings, the input, the pipeline, its lines and its manifest."""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from apache_beam.internal import pickler
from apache_beam.internal.cloudpickle import cloudpickle
from apache_beam.ml.inference.base import PredictionResult
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

import benchmarks
from apache_beam_vllm_dynamo import ErrorKind, InferenceError
from apache_beam_vllm_dynamo._responses import Answer, Failure
from benchmarks import _prompt_file, prefix_reuse_dataset, vllm_dynamo_kv_benchmark
from benchmarks._arm_pipeline import TimedHandler, parse_prompt, to_record
from benchmarks._arms import ARMS, USUAL_ARMS, Settings, make_handler, stand_in
from benchmarks._document_text import LABELS, answers_with
from benchmarks.prefix_reuse_dataset import Parameters
from tests.support.stacks import MODEL

pytestmark = pytest.mark.usefixtures('nothing_left')

KEYS = {
    'id', 'family', 'cohort', 'arm', 'run', 'text', 'parses', 'finish_reason', 'prompt_tokens',
    'cached_tokens', 'completion_tokens', 'engine', 'ttft_ms', 'latency_ms', 'queue_ms',
    'completed_at_ms', 'attempts', 'error',
}  # fmt: skip
FAST = ('--engine', 'simulated', '--num_gpus', '2', '--simulation_speedup', '1000')


def gpu_settings(**fields: Any) -> Settings:
    return Settings(**{'engine': 'vllm', 'model': 'm', 'num_gpus': 4, 'max_tokens': 8, **fields})


# The arms.


def test_arms_differ_in_their_servers_and_in_nothing_else() -> None:
    settings = gpu_settings(max_num_seqs=32, gpu_memory_utilization=0.8, max_model_len=4096)
    flags = {
        'gpu-memory-utilization': 0.8,
        'max-num-seqs': 32,
        'max-model-len': 4096,
        'enable-prefix-caching': True,
    }
    found = {name: make_handler(arm, settings) for name, arm in ARMS.items()}
    for name, handler in found.items():
        assert handler.on_error == 'return'
        config = handler._config
        if ARMS[name].native:
            assert config is None
            assert handler._native_server.vllm_server_kwargs == flags | {
                'data-parallel-size': 4,
                'enable-prompt-tokens-details': True,
            }
        else:
            assert config is not None
            assert [spec.gpu_devices for spec in config.listed_engines] == [
                ('0',), ('1',), ('2',), ('3',),
            ]  # fmt: skip
            assert all(spec.vllm_server_kwargs == flags for spec in config.listed_engines)
    routing = {
        name: (handler._config.router_mode, handler._config.kv_event_mode)
        for name, handler in found.items()
        if handler._config is not None
    }
    assert routing == {
        'dynamo-rr': ('round-robin', 'disabled'),
        'dynamo-rr-ordered': ('round-robin', 'disabled'),
        'dynamo-approx': ('kv', 'approximate'),
        'dynamo-kv': ('kv', 'zmq'),
        'dynamo-kv-ordered': ('kv', 'zmq'),
    }
    assert set(USUAL_ARMS) == {'native-dp', 'dynamo-rr', 'dynamo-kv'}


@pytest.mark.parametrize('name', ARMS)
def test_prompts_are_put_in_order_by_the_arms_that_say_so(name: str) -> None:
    assert ARMS[name].handler == {'order_by_prefix': name.endswith('-ordered')}


def test_on_simulated_engines_the_native_arm_is_stood_in_for_and_that_is_said() -> None:
    settings = gpu_settings(engine='simulated', kv_cache_tokens=1600, simulation_speedup=2)
    config = make_handler(ARMS['native-dp'], settings)._config
    assert config is not None
    [engine] = config.listed_engines
    assert config.router_mode == 'round-robin'
    assert engine.vllm_server_kwargs == {
        'enable-prefix-caching': True,
        'data-parallel-size': 4,
        'num-gpu-blocks-override': 100,
    }
    assert engine.simulation_kwargs == {'speedup-ratio': 2}
    said = stand_in(ARMS['native-dp'], settings)
    assert said is not None
    assert 'stood in for here by one simulated engine with --data-parallel-size 4' in said
    assert stand_in(ARMS['dynamo-kv'], settings) is None
    assert stand_in(ARMS['native-dp'], gpu_settings()) is None


def test_cpu_engines_get_equal_shares_of_the_cores_in_every_arm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr('os.sched_getaffinity', lambda _: {0, 1, 2, 3, 4})
    settings = gpu_settings(engine='cpu', num_gpus=2)
    handler = make_handler(ARMS['native-dp'], settings)
    assert handler._server_env == {
        'VLLM_CPU_KVCACHE_SPACE': '1',
        'HF_HUB_OFFLINE': '1',
        'VLLM_CPU_OMP_THREADS_BIND': '0,1|2,3,4',
    }
    assert handler._native_server.vllm_server_kwargs['dtype'] == 'float32'


def test_a_batch_size_is_that_of_every_batch() -> None:
    sizes = make_handler(ARMS['dynamo-kv'], gpu_settings(batch_size=24)).batch_elements_kwargs()
    assert (sizes['min_batch_size'], sizes['max_batch_size']) == (24, 24)


def test_only_dynamo_is_asked_for_what_only_dynamo_knows() -> None:
    settings = gpu_settings(temperature=0.5, seed=7)
    common = {'max_tokens': 8, 'temperature': 0.5, 'seed': 7}
    assert settings.inference_args(ARMS['native-dp']) == common
    assert settings.inference_args(ARMS['dynamo-rr']) == common | {
        'extra_body': {'nvext': {'extra_fields': ['worker_id', 'timing']}}
    }


# The input.


@given(st.text(min_size=1, alphabet=st.characters(exclude_categories=['Cs'])))
def test_any_text_is_a_prompt(text: str) -> None:
    row = parse_prompt(json.dumps({'prompt': text}))
    assert row['prompt'] == text
    assert (row['family'], row['cohort']) == (None, 'all')
    assert row['id'] == parse_prompt(json.dumps({'prompt': text, 'id': None}))['id']


def test_numbers_may_name_a_prompt_its_family_and_its_cohort() -> None:
    row = parse_prompt('{"prompt": "p", "id": 7, "family": 1.5, "cohort": "95", "more": []}')
    assert row == {'prompt': 'p', 'id': '7', 'family': '1.5', 'cohort': '95'}


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{"prompt": "a"', 'it is no JSON'),
        ('["a"]', 'it is ["a"], not a JSON object'),
        ('{"text": "a"}', '"prompt" is missing'),
        ('{"prompt": ""}', '"prompt" is ""; it must be a text that is not empty'),
        ('{"prompt": 3}', '"prompt" is 3'),
        ('{"prompt": "\\ud800"}', '"prompt" holds what is no text'),
        ('{"prompt": "a", "cohort": "\\ud800"}', '"cohort" holds what is no text'),
        ('{"prompt": "a", "id": "\\ud800"}', '"id" holds what is no text'),
        ('[' * 100_000, 'it is no JSON'),
        ('{"prompt": "a", "cohort": ["x"]}', '"cohort" is ["x"]; it must be a text or a number'),
        ('{"prompt": "a", "id": true}', '"id" is true'),
        ('[' * 30 + '1' + ']' * 30 + ' ' * 10, 'not a JSON object'),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(
    tmp_path: pathlib.Path, line: str, said: str
) -> None:
    path = tmp_path / 'prompts.jsonl'
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(ValueError, match='line 3 of') as refused:
        _prompt_file.examine(str(path))
    assert said in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_file_that_is_not_compressed_as_its_name_says_is_refused(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / 'prompts.jsonl.gz'
    path.write_text('{"prompt": "a"}')
    with pytest.raises(ValueError, match='cannot be read'):
        _prompt_file.examine(str(path))


def test_input_may_be_several_files_and_compressed(tmp_path: pathlib.Path) -> None:
    (tmp_path / 'a.jsonl').write_text('{"prompt": "1", "cohort": "x"}\n\n{"prompt": "2"}')
    (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(b'{"prompt": "3"}\n'))
    found = _prompt_file.examine(f'{tmp_path}/*.jsonl*')
    assert (found.files, found.records, found.cohorts) == (2, 3, {'x': 1, 'all': 2})
    assert [row['prompt'] for row in _prompt_file.prompts(f'{tmp_path}/*.jsonl*')] == [
        '1',
        '2',
        '3',
    ]


# The output.


def completion(**fields: Any) -> Completion:
    body = {
        'id': 'c', 'object': 'text_completion', 'created': 1, 'model': 'm',
        'choices': [{'index': 0, 'text': ' Supported.', 'finish_reason': 'stop', 'logprobs': None}],
        'usage': {
            'prompt_tokens': 9, 'completion_tokens': 3, 'total_tokens': 12,
            'prompt_tokens_details': {'cached_tokens': 4},
        },
        **fields,
    }  # fmt: skip
    return Completion.model_validate(body)


def recorded(outcome: Any, labels: tuple[str, ...] = LABELS) -> dict[str, Any]:
    result: PredictionResult = TimedHandler('m').result_of('prompt', outcome)
    return to_record(result, labels)


def test_an_answer_has_its_text_tokens_engine_and_times() -> None:
    nvext = {'worker_id': {'decode_worker_id': 77}, 'timing': {'ttft_ms': 12.5}}
    answer = Answer(completion(nvext=nvext), 0.25, 0.004, 2, (), 1_700_000_000_000)
    assert recorded(answer) == {
        'text': ' Supported.',
        'parses': True,
        'finish_reason': 'stop',
        'prompt_tokens': 9,
        'cached_tokens': 4,
        'completion_tokens': 3,
        'engine': '77',
        'ttft_ms': 12.5,
        'latency_ms': 250.0,
        'queue_ms': 4.0,
        'completed_at_ms': 1_700_000_000_000,
        'attempts': 2,
        'error': None,
    }


def test_what_the_native_server_does_not_tell_is_null() -> None:
    found = recorded(Answer(completion(), 0.25, 0, 1, (), 1), labels=())
    assert (found['engine'], found['ttft_ms'], found['parses']) == (None, None, None)


def test_a_prompt_without_an_answer_keeps_its_line_with_the_same_fields() -> None:
    error = InferenceError(ErrorKind.PROMPT_TOO_LONG, 400, 'too long')
    found = recorded(Failure(error, 0.1, 0, 1, (), 5))
    assert found.keys() == recorded(Answer(completion(), 0.25, 0, 1, (), 1)).keys()
    assert found['text'] is found['prompt_tokens'] is None
    assert found['error'] == 'prompt_too_long (HTTP 400, sent once): too long'


@pytest.mark.parametrize(
    ('text', 'parses'),
    [(' supported', True), ('\n"Contradicted".', True), ('unmentioned, I think', True),
     ('It is supported', False), ('', False), ('unsupported', False)],
)  # fmt: skip
def test_an_answer_parses_if_its_first_word_is_a_label(text: str, parses: bool) -> None:  # noqa: FBT001 - a parameter of a test
    assert answers_with(text, LABELS) is parses


def test_labels_may_have_spaces_around_them() -> None:
    assert vllm_dynamo_kv_benchmark.words(' Yes, no ,') == ('yes', 'no')


def test_the_rate_counts_answers_alone_and_no_start() -> None:
    found = vllm_dynamo_kv_benchmark.rates(
        {
            'inference_wall_clock_ms': {'count': 90, 'min': 10_000, 'max': 14_500, 'sum': 0},
            'completion_tokens': 900,
            'failed_prompt_too_long': 7,
            'failed_unavailable': 3,
        }
    )
    assert found == {
        'answered': 90,
        'failed': 10,
        'window_s': 4.5,
        'records_per_s': 20.0,
        'output_tokens_per_s': 200.0,
    }


@pytest.mark.parametrize('clock', [None, {'count': 1, 'min': 5, 'max': 5, 'sum': 5}])
def test_without_two_answers_there_is_no_rate(clock: Any) -> None:
    metrics = {'inference_wall_clock_ms': clock} if clock else {'failed_unavailable': 4}
    found = vllm_dynamo_kv_benchmark.rates(metrics)
    assert found['records_per_s'] is found['output_tokens_per_s'] is None


# Whole runs.


@pytest.fixture
def prompts(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / 'prompts.jsonl'
    prefix_reuse_dataset.write(Parameters(40, 0.75, 5, 300, model=MODEL), path)
    return path


def lines_of(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ('arm', 'options'),
    [('native-dp', ()), ('dynamo-rr', ('--batch_size', '8')), ('dynamo-kv', ())],
)
def test_every_arm_answers_each_prompt_once_and_says_what_it_took(
    tmp_path: pathlib.Path, prompts: pathlib.Path, arm: str, options: tuple[str, ...]
) -> None:
    output = tmp_path / 'out'
    status = vllm_dynamo_kv_benchmark.main([
        '--arm', arm, '--model', MODEL, *FAST, '--input', str(prompts), '--output', str(output),
        '--run_id', 'r1', '--max_tokens', '5', '--runner=FnApiRunner', *options,
    ])  # fmt: skip
    assert status == 0
    [shard] = tmp_path.glob('out-*-of-*.jsonl')
    rows, asked = lines_of(shard), lines_of(prompts)
    assert all(row.keys() == KEYS for row in rows)
    names = ('id', 'family', 'cohort')
    assert sorted([row[n] for n in names] for row in rows) == sorted(
        [row[n] for n in names] for row in asked
    )
    for row in rows:
        assert (row['arm'], row['run'], row['error']) == (arm, 'r1', None)
        assert (row['completion_tokens'], row['finish_reason']) == (5, 'length')
        assert row['prompt_tokens'] > 300
        assert 0 < row['ttft_ms'] < row['latency_ms'] + 1
    manifest = json.loads((tmp_path / 'out-manifest.json').read_text())
    assert manifest['arm'] == arm
    assert (manifest['stand_in'] is not None) == (arm == 'native-dp')
    assert manifest['settings']['num_gpus'] == 2
    assert manifest['input']['records'] == manifest['answered'] == 40
    assert manifest['failed'] == 0
    assert manifest['records_per_s'] > 0
    assert manifest['versions']['apache-beam'].startswith('2.')
    metrics = manifest['metrics']
    assert metrics['prompt_tokens'] == sum(row['prompt_tokens'] for row in rows)
    assert metrics['cached_prompt_tokens'] == sum(row['cached_tokens'] for row in rows) > 0
    assert len({row['engine'] for row in rows}) == (1 if arm == 'native-dp' else 2)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        vllm_dynamo_kv_benchmark.main([*arguments])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ('changed', 'said'),
    [
        (('--arm', 'dynamo'), "invalid choice: 'dynamo'"),
        (('--input', '/no/such/file.jsonl'), 'there is no file /no/such/file.jsonl'),
        (('--input', 'BLANK'), 'holds no prompts'),
        (('--input', 'WRONG'), 'line 2 of'),
        (('--num_gpus', '0'), '0 is too small; it must be 1 or more'),
        (('--gpu_memory_utilization', '90'), '90 is no share'),
        (('--temperature', '-1'), '-1 does not work; it must be 0 or more'),
        (('--labels', 'yes,not sure'), "'not sure' is not one word"),
        (('--max_tokens', 'many'), "invalid positive value: 'many'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    changed: tuple[str, str],
    said: str,
) -> None:
    files = {'GOOD': '{"prompt": "p"}\n', 'BLANK': '\n \n', 'WRONG': '{"prompt": "p"}\n{}\n'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    flags = {'--arm': 'dynamo-kv', '--input': 'GOOD', '--model': MODEL, '--num_gpus': '1'}
    flags |= {'--output': str(tmp_path / 'out'), '--engine': 'simulated'} | dict([changed])
    if flags['--input'] in files:
        flags['--input'] = str(tmp_path / flags['--input'])
    message = refused(capsys, *(word for pair in flags.items() for word in pair))
    assert said in message
    assert 'Traceback' not in message
    assert {path.name for path in tmp_path.iterdir()} == set(files)


ON_A_WORKER = """
import sys
from apache_beam.internal import pickler
sys.modules['benchmarks'] = None  # an import of it fails
handler, parse, record = pickler.loads(sys.stdin.buffer.read())
print(parse('{"prompt": "p"}')['cohort'], handler)
"""


def test_workers_need_not_have_the_benchmarks(tmp_path: pathlib.Path) -> None:
    """What a run hands to its workers carries its own code."""
    handler = make_handler(ARMS['dynamo-kv'], gpu_settings())
    cloudpickle.register_pickle_by_value(benchmarks)
    try:
        sent = pickler.dumps((handler, parse_prompt, to_record))
    finally:
        cloudpickle.unregister_pickle_by_value(benchmarks)
    worker = subprocess.run(
        [sys.executable, '-P', '-c', ON_A_WORKER],
        input=sent,
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert worker.returncode == 0, worker.stderr.decode()
    assert worker.stdout.decode().startswith('all TimedHandler')
