"""The examples beside the first one, each on simulated engines, and on a fake server for the rest.

What simulated engines write is noise: there they show where answers go that are of no use.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream

from apache_beam_vllm_dynamo import VLLMChatModelHandler
from examples import classify_csv, resume, streaming, structured_output, two_models
from tests import fake_server
from tests.fake_server import FakeServer
from tests.support.pipelines import collect, collected, our_metrics
from tests.support.processes import ROOT, ProcessTree
from tests.support.stacks import MODEL
from tests.test_inference import OnServer

pytestmark = pytest.mark.usefixtures('nothing_left')

IN_PROCESS = ['--runner=FnApiRunner']
ENGINES = ['--engine_kind', 'simulated', '--dynamo_engines', '1', '--max_tokens', '4']
SIMULATED = ['--model', MODEL, *ENGINES]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """What the handler of an example takes for its server."""
    with FakeServer() as fake:
        monkeypatch.setattr(VLLMChatModelHandler, 'load_model', lambda _: OnServer(fake, window=8))
        yield fake


def write_lines(path: pathlib.Path, *rows: Any) -> str:
    """A file with a row on each line, as JSON unless it is text."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text('\n'.join(lines))
    return str(path)


def read_lines(directory: pathlib.Path, pattern: str) -> list[dict[str, Any]]:
    found = sorted(directory.glob(pattern))
    return [json.loads(line) for path in found for line in path.read_text().splitlines()]


def by_id(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    assert len({row['id'] for row in rows}) == len(rows)
    return {row['id']: row for row in rows}


REVIEW = {'product': 'lamp', 'sentiment': 'negative', 'complaints': ['too dark']}


def test_structured_output_parses_what_is_a_review_and_keeps_the_rest_with_its_reason(
    server: FakeServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is lost, and each dead letter can be read in again."""
    monkeypatch.setattr(fake_server, 'answer', echo)
    rows: list[Any] = [
        {'id': 0, 'text': json.dumps(REVIEW), 'tag': 'kept'},
        {'id': 1, 'text': json.dumps(REVIEW | {'sentiment': 'angry'})},
        {'id': 2, 'text': '[status=400]'},
        {'id': 3, 'words': 'no text'},
        'no JSON',
    ]
    structured_output.main(
        [
            '--model', 'm', '--input', write_lines(tmp_path / 'in.jsonl', *rows),
            '--output', f'{tmp_path}/out', '--dead_letter', f'{tmp_path}/dead', *IN_PROCESS,
        ]
    )  # fmt: skip
    assert read_lines(tmp_path, 'out-*') == [rows[0] | {'review': REVIEW}]
    dead = {row['line']: row for row in read_lines(tmp_path, 'dead-*')}
    assert {line: row['reason'] for line, row in dead.items()} == {
        json.dumps(rows[1]): 'unparsable',
        json.dumps(rows[2]): 'unanswered',
        json.dumps(rows[3]): 'unreadable',
        'no JSON': 'unreadable',
    }
    unparsable = dead[json.dumps(rows[1])]
    assert unparsable['answer'] == rows[1]['text']
    assert "'positive', 'negative' or 'neutral'" in unparsable['error']
    asked = server.bodies[0]['response_format']['json_schema']['schema']
    assert asked['required'] == ['product', 'sentiment', 'complaints']


def echo(body: dict[str, Any], answer: Callable[..., Any] = fake_server.answer) -> dict[str, Any]:
    """An answer with the letters of the prompt as they were."""
    answered: dict[str, Any] = answer(body)
    answered['choices'][0]['message']['content'] = body['messages'][-1]['content']
    return answered


def test_structured_output_runs_as_a_program_on_engines_whose_answers_are_cut_off(
    tmp_path: pathlib.Path,
) -> None:
    """The class of a review then lies in the main program and travels by value."""
    path = write_lines(tmp_path / 'in.jsonl', *({'id': i, 'text': f'text {i}'} for i in range(9)))
    with ProcessTree() as tree:
        done = subprocess.run(
            (
                sys.executable, '-m', 'examples.structured_output', *SIMULATED, '--input', path,
                '--output', f'{tmp_path}/out', '--dead_letter', f'{tmp_path}/dead', *IN_PROCESS,
            ),
            cwd=ROOT, env={**os.environ, **tree.env}, capture_output=True, text=True, timeout=90,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        tree.wait_until_gone()
    dead = read_lines(tmp_path, 'dead-*')
    assert {json.loads(row['line'])['id'] for row in dead} == set(range(9))
    for row in dead:
        assert row['reason'] == 'unparsable'
        assert 'the answer was cut off; raise --max_tokens' in row['error']
        assert row['answer']
    assert read_lines(tmp_path, 'out-*') == []


@pytest.mark.parametrize(
    ('content', 'finish_reason', 'mistake'),
    [
        (json.dumps(REVIEW), 'length', 'cut off'),
        ('', 'stop', 'Invalid JSON'),
        ('{"product": "lamp"}', 'stop', 'Field required'),
        (json.dumps(REVIEW | {'complaints': 'dark'}), 'stop', 'valid array'),
    ],
)
def test_what_is_no_review_is_a_value_error(content: str, finish_reason: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=mistake):
        structured_output.parse_review(content, finish_reason)
    assert structured_output.parse_review(json.dumps(REVIEW), 'stop').model_dump() == REVIEW


def test_two_models_answer_each_prompt_on_engines_of_their_own(tmp_path: pathlib.Path) -> None:
    """One has an engine and the other two, all at once; a prompt may fail with each."""
    other = tmp_path / 'other-model'
    other.symlink_to(MODEL, target_is_directory=True)
    rows = [{'id': i, 'prompt': f'prompt number {i}'} for i in range(8)]
    two_models.main(
        [
            '--models', MODEL, str(other), '--gpu_devices', '0', '1,2',
            '--engine_kind', 'simulated', '--max_tokens', '4', *IN_PROCESS,
            '--input', write_lines(tmp_path / 'in.jsonl', *rows, {'id': 8, 'prompt': 7}),
            '--output', f'{tmp_path}/out',
        ]
    )  # fmt: skip
    found = by_id(read_lines(tmp_path, 'out-*'))
    assert found.keys() == set(range(9))
    for row in found.values():
        assert row['answers'].keys() == {MODEL, str(other)}
        for answer in row['answers'].values():
            if row['id'] == 8:
                assert answer['completion'] is None
                assert answer['error'].startswith('invalid_request')
            else:
                assert answer['completion']
                assert answer['error'] is None


def test_each_of_two_models_has_an_engine_on_each_of_its_gpus() -> None:
    args = two_models.make_parser().parse_args(
        ['--models', 'a', 'b', '--gpu_devices', '0', '1,2', '--input', 'i', '--output', 'o']
    )
    handlers = two_models.make_handlers(args)
    configs = {model: handler._config for model, handler in handlers.items()}
    assert {
        model: [spec.gpu_devices for spec in config.listed_engines]
        for model, config in configs.items()
        if config is not None
    } == {'a': [('0',)], 'b': [('1',), ('2',)]}


def test_streaming_answers_messages_and_reports_those_without_an_answer() -> None:
    """All that is between the subscription and the topics, on a stream that a test makes."""
    args = streaming.make_parser().parse_args(
        [
            *SIMULATED, '--input_subscription', 'projects/p/subscriptions/s',
            '--output_topic', 'projects/p/topics/t', '--error_topic', 'projects/p/topics/e',
        ]
    )  # fmt: skip
    stream = (
        TestStream(coder=beam.coders.BytesCoder())
        .add_elements([b'{"id": 1, "prompt": "Hello"}', b'\xff', b'{"id": 2}'])
        .advance_processing_time(10)
        .add_elements([b'{"id": 3, "prompt": "Hello again"}'])
        .advance_watermark_to_infinity()
    )
    collected.clear()
    options = PipelineOptions(['--runner=BundleBasedDirectRunner'])
    with beam.Pipeline(options=options) as pipeline:
        handler = streaming.make_handler(args)
        answers, errors = streaming.answer(pipeline | stream, handler, {'max_tokens': 4})
        _ = answers | 'answers' >> beam.Map(json.loads) | 'keep answers' >> beam.Map(collect)
        _ = errors | 'errors' >> beam.Map(json.loads) | 'keep errors' >> beam.Map(collect)
    answered = by_id([message for message in collected if 'completion' in message])
    assert answered.keys() == {1, 3}
    assert all(message['completion'] for message in answered.values())
    failed = {message['message']: message['error'] for message in collected if 'error' in message}
    assert failed.keys() == {'\N{REPLACEMENT CHARACTER}', '{"id": 2}'}
    assert 'it must be a JSON object with a "prompt"' in failed['{"id": 2}']


def test_streaming_reports_a_message_that_the_server_refuses(server: FakeServer) -> None:
    handler = VLLMChatModelHandler('m', on_error='return', max_batch_duration_secs=1)
    collected.clear()
    with beam.Pipeline(options=PipelineOptions(IN_PROCESS)) as pipeline:
        messages = pipeline | beam.Create([b'{"prompt": "[status=400]"}', b'{"prompt": "ok"}'])
        answers, errors = streaming.answer(messages, handler, {})
        _ = (answers, errors) | beam.Flatten() | beam.Map(json.loads) | beam.Map(collect)
    [answer] = [message for message in collected if 'completion' in message]
    assert answer == {'prompt': 'ok', 'completion': 'OK'}
    [error] = [message for message in collected if 'error' in message]
    assert error['message'] == '{"prompt": "[status=400]"}'
    assert error['error'].startswith('invalid_request (HTTP 400')


def test_resume_asks_for_what_has_no_answer_yet(tmp_path: pathlib.Path) -> None:
    """For new ids, those with an error, and those of a file that was never finished."""
    output = tmp_path / 'out'
    output.mkdir()
    rows: list[Any] = [{'id': i, 'prompt': f'prompt number {i}'} for i in range(5)]
    done = {'completion': 'Hello', 'error': None}
    write_lines(output / 'part-1.jsonl', rows[0] | done, rows[1] | done)
    write_lines(output / 'part-2.jsonl', rows[2] | {'completion': None, 'error': 'overloaded'})
    write_lines(output / 'unfinished-part-3.jsonl', rows[3] | done)
    path = write_lines(tmp_path / 'in.jsonl', *rows, {'id': '0', 'prompt': 7})
    earlier = set(output.iterdir())
    resume.main([*SIMULATED, '--output', str(output), '--input', path, *IN_PROCESS])
    for file in earlier:
        file.unlink()
    found = by_id(read_lines(output, 'part-*.jsonl'))
    assert found.keys() == {2, 3, 4, '0'}
    assert found['0']['error'].startswith('invalid_request')
    for i in (2, 3, 4):
        assert found[i]['completion']
        assert found[i]['error'] is None


def test_a_job_that_dies_is_resumed_where_it_was(
    server: FakeServer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had written is whole and is not asked for again; every id has one answer."""
    output = tmp_path / 'out'
    rows = [{'id': i, 'prompt': f'number {i}'} for i in range(40)]
    run = [
        '--model', 'm', '--output', str(output), '--answers_per_file', '5', *IN_PROCESS,
        '--input', write_lines(tmp_path / 'in.jsonl', *rows),
    ]  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(resume.WriteParts, '_write', dies_after(3, resume.WriteParts._write))
        with pytest.raises(Exception, match='the job dies'):
            resume.main(run)
    written = by_id(read_lines(output, 'part-*.jsonl'))
    assert len(written) == 15
    server.prompts.clear()
    resume.main(run)
    assert len(server.prompts) == 25
    assert by_id(read_lines(output, 'part-*.jsonl')).keys() == set(range(40))
    assert {path.name.split('-')[0] for path in output.iterdir()} == {'part'}


def dies_after(times: int, write: Callable[[Any], None]) -> Callable[[Any], None]:
    written: list[int] = []

    def dies(self: resume.WriteParts) -> None:
        if len(written) == times:
            raise RuntimeError('the job dies')
        written.append(1)
        write(self)

    return dies


def test_claims_are_labelled_beside_their_document(
    server: FakeServer, tmp_path: pathlib.Path
) -> None:
    """Fields may hold commas, quotes and line breaks; an answer that is no label is an error."""
    rows = [
        {'id': '1', 'document': 'One, "two"\nthree', 'claim': 'Supported'},
        {'id': '2', 'document': 'Ünïcode', 'claim': ' not mentioned'},
        {'id': '3', 'document': 'One, "two"\nthree', 'claim': 'something else'},
        {'id': '4', 'document': 'Ünïcode', 'claim': '[status=400]'},
    ]
    write_csv(tmp_path / 'in.csv', rows)
    classify_csv.main(
        [
            '--model',
            'm',
            '--input',
            f'{tmp_path}/in.csv',
            '--output',
            f'{tmp_path}/out',
            *IN_PROCESS,
        ]
    )
    found = {row['id']: row for row in read_csv(tmp_path)}
    assert [found[row['id']]['document'] for row in rows] == [row['document'] for row in rows]
    assert {i: row['label'] for i, row in found.items()} == {
        '1': 'supported', '2': 'not mentioned', '3': '', '4': '',
    }  # fmt: skip
    errors = {i: row['error'] for i, row in found.items()}
    assert (errors['1'], errors['2'], errors['3']) == ('', '', 'no label: SOMETHING ELSE')
    assert errors['4'].startswith('invalid_request')
    assert server.bodies[0]['guided_choice'] == list(classify_csv.LABELS)


DOCUMENTS = [f'Document {name} says: ' + f'{name} and so on, ' * 40 for name in 'abcdef']
CLAIMS = [
    {'document': document, 'claim': f'claim number {i}'} for i in range(8) for document in DOCUMENTS
]


def test_claims_are_asked_about_on_engines_whose_answers_are_no_labels() -> None:
    args = classify_csv.make_parser().parse_args(['--input', 'i', '--output', 'o', *SIMULATED[:-2]])
    collected.clear()
    with beam.Pipeline(options=PipelineOptions(IN_PROCESS)) as pipeline:
        handler = classify_csv.make_handler(args)
        labelled = classify_csv.classify(pipeline | beam.Create(CLAIMS), handler)
        _ = labelled | beam.Map(collect)
    found = [{'document': row['document'], 'claim': row['claim']} for row in collected]
    assert sorted(found, key=str) == sorted(CLAIMS, key=str)
    assert all(bool(row['label']) != bool(row['error']) for row in collected)
    assert our_metrics(pipeline.result)['cached_prompt_tokens']


def test_claims_of_a_document_are_asked_about_one_after_the_other(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever they stand in the file; here no two of them stand together."""
    monkeypatch.setattr(VLLMChatModelHandler, 'load_model', lambda _: OnServer(server, window=1))
    with beam.Pipeline(options=PipelineOptions(IN_PROCESS)) as pipeline:
        handler = VLLMChatModelHandler('m', on_error='return')
        _ = classify_csv.classify(pipeline | beam.Create(CLAIMS), handler)
    asked = [body['messages'][0]['content'] for body in server.bodies]
    assert len(asked) == len(CLAIMS)
    assert len([document for document, _ in itertools.groupby(asked)]) == len(DOCUMENTS)


def write_csv(path: pathlib.Path, rows: list[dict[str, str]]) -> None:
    with path.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(directory: pathlib.Path) -> list[dict[str, str]]:
    [path] = directory.glob('out-*.csv')
    with path.open(newline='', encoding='utf-8') as file:
        return list(csv.DictReader(file))


TWO_MODELS = ['--input', 'i', '--output', 'o', '--models', 'a', 'b', '--gpu_devices']
TOPICS = ['--input_subscription', 's', '--output_topic', 't', '--error_topic', 'e']
FILES = ['--input', 'i', '--output', 'o']


@pytest.mark.parametrize(
    ('main', 'argv', 'message'),
    [
        (two_models.main, [*TWO_MODELS, '0'], '--gpu_devices once for each of --models'),
        (two_models.main, [*TWO_MODELS, '0', '0,1'], 'must differ from each other'),
        (two_models.main, [*TWO_MODELS, '0', 'x'], "gpu_devices holds 'x'"),
        (
            streaming.main,
            ['--model', 'm', *TOPICS, '--dynamo_engines', '0'],
            'num_engines is 0',
        ),
        (
            classify_csv.main,
            ['--model', 'm', '--input', 'no.csv', '--output', 'o'],
            'no file no.csv',
        ),
        (
            classify_csv.main,
            ['--model', 'm', '--input', 'pyproject.toml', '--output', 'o'],
            'has no column document, but [build-system]',
        ),
        (resume.main, ['--model', 'm', *FILES, '--dynamo_engines', '0'], 'num_engines is 0'),
        (
            structured_output.main,
            ['--model', '', *FILES, '--dead_letter', 'd'],
            'give a hub name',
        ),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    main: Callable[[list[str]], int],
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr('apache_beam.Pipeline', None)
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
