"""Answer the prompts of a file; started again, answer those that an earlier run left over.

    python -m examples.resume --model Qwen/Qwen3-0.6B --dynamo_engines 2 \
        --input prompts.jsonl --output answers

Each line of the input is a JSON object with an ``id`` of its own and a ``prompt``. The output is
a directory of files ``part-….jsonl``. A line of them is the object of the input with
``completion`` and ``error`` in it, one of which is null.

Beam's own sinks move their files into place when all is written, so that a job which dies leaves
nothing. Here each worker writes a file for every ``--answers_per_file`` answers, and a job that
was killed loses no more than those that it had not yet written. Run the same command again: the
ids that have an answer in the directory are not asked about again; those with an error are.

An id may be there twice, with an error from an earlier run, or where a runner tried a bundle
again; whoever reads the directory takes one of its answers.

Arguments that ``--help`` does not list are options of the pipeline, such as ``--runner``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    InferenceError,
    LLMInference,
    OpenAIChatMessage,
    VLLMChatModelHandler,
)

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline that ``argv``, the arguments without the program's name, describes."""
    parser = make_parser()
    args, pipeline_args = parser.parse_known_args(argv)
    try:
        handler = make_handler(args)
    except ValueError as error:
        parser.error(str(error))
    # Looked up before the job starts to write files there itself.
    [earlier] = FileSystems.match([FileSystems.join(args.output, 'part-*.jsonl')])
    with beam.Pipeline(options=PipelineOptions(pipeline_args)) as pipeline:
        rows = pipeline | 'Read' >> beam.io.ReadFromText(args.input) | 'Parse' >> beam.Map(parse)
        records = (
            pipeline
            | 'Earlier' >> beam.Create([file.path for file in earlier.metadata_list])
            | 'ReadEarlier' >> beam.io.ReadAllFromText()
            | 'ParseEarlier' >> beam.Map(parse)
        )
        _ = (
            left_over(rows, records)
            | 'Prompt' >> beam.Map(lambda row: (row, conversation(row)))
            | 'Ask' >> LLMInference(KeyedModelHandler(handler), {'max_tokens': args.max_tokens})
            | 'Record' >> beam.Map(to_record)
            | 'Write' >> beam.ParDo(WriteParts(args.output, args.answers_per_file))
        )
    return 0


def left_over(rows: beam.PCollection[Row], records: beam.PCollection[Row]) -> beam.PCollection[Row]:
    """The rows whose ids have no answer among the records of earlier runs."""
    answered = records | 'Answered' >> beam.Filter(lambda record: record['error'] is None)
    left: beam.PCollection[Row] = (
        {
            'row': rows | 'RowById' >> beam.Map(by_id),
            'answered': answered | 'AnsweredById' >> beam.Map(by_id),
        }
        | 'Join' >> beam.CoGroupByKey()
        | 'LeftOver' >> beam.FlatMap(rows_without_answer)
    )
    return left


class WriteParts(beam.DoFn):
    """Writes a file as soon as there are enough answers for one."""

    def __init__(self, directory: str, answers_per_file: int) -> None:
        super().__init__()
        self._directory = directory
        self._answers_per_file = answers_per_file
        self._lines: list[str] = []

    def start_bundle(self) -> None:
        """Forgets the answers of a bundle that failed: it comes again."""
        self._lines = []

    def process(self, record: Row) -> None:
        """Takes an answer."""
        self._lines.append(json.dumps(record))
        if len(self._lines) >= self._answers_per_file:
            self._write()

    def finish_bundle(self) -> None:
        """Writes what is left."""
        if self._lines:
            self._write()

    def _write(self) -> None:
        name = f'part-{uuid.uuid4().hex}.jsonl'
        path = FileSystems.join(self._directory, name)
        # No half of a file may look like one: it gets its name when it is complete.
        temporary = FileSystems.join(self._directory, f'unfinished-{name}')
        with FileSystems.create(temporary) as file:
            file.write(''.join(f'{line}\n' for line in self._lines).encode())
        FileSystems.rename([temporary], [path])
        self._lines = []


def make_handler(args: argparse.Namespace) -> VLLMChatModelHandler:
    """The model handler that the arguments describe.

    Raises:
      ConfigurationError: They cannot work, alone or together.
    """
    config = DynamoRuntimeConfig.for_devices(
        num_engines=args.dynamo_engines, engine_kind=args.engine_kind
    )
    return VLLMChatModelHandler(
        args.model, use_dynamo=True, dynamo_runtime_config=config, on_error='return'
    )


def parse(line: str) -> Row:
    """The row on a line."""
    row: Row = json.loads(line)
    return row


def by_id(row: Row) -> tuple[str, Row]:
    """A row with its id as a key; 7 and "7" are two ids."""
    return json.dumps(row['id']), row


def rows_without_answer(group: tuple[str, dict[str, Sequence[Row]]]) -> Iterator[Row]:
    """The row of an id, if it has no answer."""
    _, found = group
    if not list(found['answered']):
        yield from found['row']


def conversation(row: Row) -> list[OpenAIChatMessage]:
    """What the model is asked about a row."""
    return [OpenAIChatMessage('user', row['prompt'])]


def to_record(answered: tuple[Row, PredictionResult]) -> Row:
    """A row with its answer, for the output."""
    row, result = answered
    response: Any = result.inference
    if isinstance(response, InferenceError):
        return row | {'completion': None, 'error': str(response)}
    return row | {'completion': response.choices[0].message.content, 'error': None}


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = argparse.ArgumentParser(
        description='Answer the prompts of a file that have no answer from an earlier run.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--model', required=True, help='a hub name, or a directory that the workers can read')
    add('--input', required=True, help='a .jsonl file or pattern')
    add('--output', required=True, help='a directory, the same one for each run')
    add('--answers_per_file', type=int, default=1000, help='default: %(default)s')
    add('--max_tokens', type=int, default=128, help='of each completion; default: %(default)s')
    add('--dynamo_engines', type=int, help='engines on each worker; default: one for each GPU')
    add('--engine_kind', choices=('gpu', 'cpu', 'simulated'), default='gpu')
    return parser


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    sys.exit(main())
