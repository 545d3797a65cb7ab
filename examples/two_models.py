"""Put every prompt to two models, and lay their answers side by side.

    python -m examples.two_models --input prompts.jsonl --output answers \
        --models Qwen/Qwen3-0.6B Qwen/Qwen3-4B --gpu_devices 0 1,2

Each model has engines, a router and GPUs of its own on each worker: here the first model has one
engine on GPU 0, and the second one on GPU 1 and another on GPU 2. The same command runs on a
machine without GPUs with ``--engine_kind simulated``, which leaves the devices aside and keeps
the number of engines.

Each line of the input is a JSON object with a ``prompt``, and a line of the output the same
object with ``answers``: for each model its ``completion`` and ``error``, one of which is null.

Arguments that ``--help`` does not list are options of the pipeline, such as ``--runner``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    ConfigurationError,
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
        handlers = make_handlers(args)
    except ValueError as error:
        parser.error(str(error))
    with beam.Pipeline(options=PipelineOptions(pipeline_args)) as pipeline:
        rows = pipeline | 'Read' >> beam.io.ReadFromText(args.input) | 'Parse' >> beam.Map(parse)
        _ = (
            ask_all(rows, handlers, {'max_tokens': args.max_tokens})
            | 'Encode' >> beam.Map(json.dumps)
            | 'Write' >> beam.io.WriteToText(args.output, file_name_suffix='.jsonl')
        )
    return 0


def ask_all(
    rows: beam.PCollection[Row],
    handlers: dict[str, VLLMChatModelHandler],
    inference_args: dict[str, Any],
) -> beam.PCollection[Row]:
    """Put each row's prompt to one model after the other.

    No model waits for another to end: a row goes on to the next one as soon as it is answered,
    so that all of them are busy at once, and no shuffle is needed to bring the answers together.
    """
    for model, handler in handlers.items():
        rows = (
            rows
            | f'Prompt {model}' >> beam.Map(lambda row: (row, conversation(row)))
            | f'Ask {model}' >> LLMInference(KeyedModelHandler(handler), inference_args)
            | f'Record {model}' >> beam.Map(with_answer, model)
        )
    return rows


def make_handlers(args: argparse.Namespace) -> dict[str, VLLMChatModelHandler]:
    """A handler for each model, by its name.

    Raises:
      ConfigurationError: They cannot work, alone or together.
    """
    if len(args.models) != len(args.gpu_devices):
        raise ConfigurationError('give --gpu_devices once for each of --models')
    devices = [device for group in args.gpu_devices for device in group.split(',')]
    if len(set(devices)) != len(devices) or len(set(args.models)) != len(args.models):
        raise ConfigurationError('--models and --gpu_devices must differ from each other')
    return {
        model: VLLMChatModelHandler(
            model,
            use_dynamo=True,
            dynamo_runtime_config=DynamoRuntimeConfig.for_devices(
                gpu_devices=group.split(','), engine_kind=args.engine_kind
            ),
            on_error='return',
        )
        for model, group in zip(args.models, args.gpu_devices, strict=True)
    }


def parse(line: str) -> Row:
    """The row on a line, with room for the answers."""
    row: Row = json.loads(line)
    return row | {'answers': {}}


def conversation(row: Row) -> list[OpenAIChatMessage]:
    """What the models are asked about a row."""
    return [OpenAIChatMessage('user', row['prompt'])]


def with_answer(answered: tuple[Row, PredictionResult], model: str) -> Row:
    """The row with the answer of one more model."""
    row, result = answered
    response: Any = result.inference
    if isinstance(response, InferenceError):
        answer = {'completion': None, 'error': str(response)}
    else:
        answer = {'completion': response.choices[0].message.content, 'error': None}
    return row | {'answers': row['answers'] | {model: answer}}


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = argparse.ArgumentParser(
        description='Put every prompt to two models, and lay their answers side by side.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--models', nargs='+', required=True, help='hub names or directories')
    add('--gpu_devices', nargs='+', required=True, help='of each model, an engine on each: 0 1,2')
    add('--input', required=True, help='a .jsonl file or pattern')
    add('--output', required=True, help='the files will be OUTPUT-00000-of-00001.jsonl and so on')
    add('--max_tokens', type=int, default=128, help='of each completion; default: %(default)s')
    add('--engine_kind', choices=('gpu', 'cpu', 'simulated'), default='gpu')
    return parser


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    sys.exit(main())
