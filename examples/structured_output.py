"""Turn texts into JSON of a given shape, and keep what failed in a file of its own.

    python -m examples.structured_output --model Qwen/Qwen3-0.6B --input reviews.jsonl \
        --output reviews --dead_letter failed --dynamo_engines 2

Each line of the input is a JSON object with a ``text``. The engine is held to the JSON schema of
:class:`Review`, and what it wrote is checked against that class all the same: an answer that was
cut off is no JSON. A line of the output is the object of the input with ``review`` in it.

Nothing is lost: what has no review is in the dead-letter file, with ``line`` (as it was read),
``reason`` (``unreadable``, ``unanswered`` or ``unparsable``), ``error``, and the ``answer`` where
there was one.

Arguments that ``--help`` does not list are options of the pipeline, such as ``--runner``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal

import apache_beam as beam
import pydantic
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    LLMInference,
    OpenAIChatMessage,
    SplitErrors,
    VLLMChatModelHandler,
)

Row = dict[str, Any]

INSTRUCTION = (
    'You are given what a customer wrote about a product. Answer with one JSON object: "product" '
    'names the product, "sentiment" is "positive", "negative" or "neutral", and "complaints" is a '
    'list of what the customer complains about, each in a few words.'
)


class Review(pydantic.BaseModel):
    """What is wanted of each text; the engine is given its schema."""

    product: str
    sentiment: Literal['positive', 'negative', 'neutral']
    complaints: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline that ``argv``, the arguments without the program's name, describes."""
    parser = make_parser()
    args, pipeline_args = parser.parse_known_args(argv)
    try:
        handler = make_handler(args)
    except ValueError as error:
        parser.error(str(error))
    with beam.Pipeline(options=PipelineOptions(pipeline_args)) as pipeline:
        lines = pipeline | 'Read' >> beam.io.ReadFromText(args.input)
        reviews, failures = review(lines, handler, args.max_tokens)
        for rows, path, label in (
            (reviews, args.output, 'Reviews'),
            (failures, args.dead_letter, 'DeadLetter'),
        ):
            _ = (
                rows
                | f'Encode{label}' >> beam.Map(json.dumps)
                | f'Write{label}' >> beam.io.WriteToText(path, file_name_suffix='.jsonl')
            )
    return 0


def review(
    lines: beam.PCollection[str], handler: VLLMChatModelHandler, max_tokens: int
) -> tuple[beam.PCollection[Row], beam.PCollection[Row]]:
    """The rows with their reviews, and the dead letters."""
    rows, unreadable = (
        lines
        | 'SkipBlank' >> beam.Filter(str.strip)
        | 'Parse' >> beam.Map(parse_line).with_exception_handling(exc_class=ValueError)
    )
    answered, unanswered = (
        rows
        | 'Prompt' >> beam.Map(lambda row: (row, conversation(row)))
        | 'Ask' >> LLMInference(KeyedModelHandler(handler), inference_args(max_tokens))
        | 'Split' >> SplitErrors()
    )
    reviews, unparsable = answered | 'Review' >> beam.Map(to_review).with_exception_handling(
        exc_class=ValueError
    )
    failures = (
        unreadable | 'Unreadable' >> beam.Map(unreadable_record),
        unanswered | 'Unanswered' >> beam.Map(unanswered_record),
        unparsable | 'Unparsable' >> beam.Map(unparsable_record),
    )
    return reviews, failures | 'DeadLetters' >> beam.Flatten()


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


def inference_args(max_tokens: int) -> dict[str, Any]:
    """Hold the engine to the schema; temperature 0 gives the likeliest answer."""
    return {
        'max_tokens': max_tokens,
        'temperature': 0,
        'response_format': {
            'type': 'json_schema',
            'json_schema': {'name': 'review', 'schema': Review.model_json_schema()},
        },
    }


def parse_line(line: str) -> Row:
    """The row on a line.

    Raises:
      ValueError: It is no JSON object with a text.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get('text'), str):
        raise ValueError('it must be a JSON object with a "text"')  # noqa: TRY004 - of line
    return row


def conversation(row: Row) -> list[OpenAIChatMessage]:
    """The instruction comes first and is the same for all: the engines keep it in their cache."""
    return [OpenAIChatMessage('system', INSTRUCTION), OpenAIChatMessage('user', row['text'])]


def parse_review(content: str, finish_reason: str) -> Review:
    """What the model wrote, as a review.

    Raises:
      ValueError: It was cut off, or it is no JSON of the right shape.
    """
    if finish_reason == 'length':
        raise ValueError('the answer was cut off; raise --max_tokens')
    return Review.model_validate_json(content)


def to_review(answered: tuple[Row, PredictionResult]) -> Row:
    """A row with its review, for the output.

    Raises:
      ValueError: The answer is no review.
    """
    row, result = answered
    response: Any = result.inference
    choice = response.choices[0]
    found = parse_review(choice.message.content or '', choice.finish_reason)
    return row | {'review': found.model_dump()}


def unreadable_record(failure: tuple[str, tuple[type, str, list[str]]]) -> Row:
    """A line of the input that holds no text, for the dead-letter file."""
    line, (_, error, _) = failure
    return {'line': line, 'reason': 'unreadable', 'error': error, 'answer': None}


def unanswered_record(failed: tuple[Row, PredictionResult]) -> Row:
    """A row that the engines did not answer, for the dead-letter file."""
    row, result = failed
    error = str(result.inference)
    return {'line': json.dumps(row), 'reason': 'unanswered', 'error': error, 'answer': None}


def unparsable_record(
    failure: tuple[tuple[Row, PredictionResult], tuple[type, str, list[str]]],
) -> Row:
    """A row whose answer is no review, for the dead-letter file."""
    (row, result), (_, error, _) = failure
    response: Any = result.inference
    answer = response.choices[0].message.content
    return {'line': json.dumps(row), 'reason': 'unparsable', 'error': error, 'answer': answer}


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = argparse.ArgumentParser(
        description='Turn texts into JSON of a given shape.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--model', required=True, help='a hub name, or a directory that the workers can read')
    add('--input', required=True, help='a .jsonl file or pattern')
    add('--output', required=True, help='the files will be OUTPUT-00000-of-00001.jsonl and so on')
    add('--dead_letter', required=True, help='the same for what has no review')
    add('--max_tokens', type=int, default=256, help='of each answer; default: %(default)s')
    add('--dynamo_engines', type=int, help='engines on each worker; default: one for each GPU')
    add('--engine_kind', choices=('gpu', 'cpu', 'simulated'), default='gpu')
    return parser


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    sys.exit(main())
