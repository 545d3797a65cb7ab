"""Answer the messages of a Pub/Sub topic with a large language model, as they come.

    python -m examples.streaming --streaming --model Qwen/Qwen3-0.6B --dynamo_engines 2 \
        --input_subscription projects/PROJECT/subscriptions/prompts \
        --output_topic projects/PROJECT/topics/answers \
        --error_topic projects/PROJECT/topics/errors \
        --runner DataflowRunner --project PROJECT \
        --region REGION --temp_location gs://BUCKET/temp

Needs ``apache-beam[gcp]``. A message is a JSON object with a ``prompt``. An answer is the same
object with ``completion`` in it; what has no answer goes to the topic for errors as ``message``,
which is the text of the message, and ``error``.

Streaming runners hand over a few elements at a time. ``RunInference`` collects them over bundles,
for up to ``--max_batch_duration_secs`` seconds, so that the engines always have many requests at
once. A longer time gives larger batches, and adds as much to each answer's latency.

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
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    OpenAIChatMessage,
    SplitErrors,
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
    with beam.Pipeline(options=PipelineOptions(pipeline_args)) as pipeline:
        messages = pipeline | 'Read' >> beam.io.ReadFromPubSub(subscription=args.input_subscription)
        answers, errors = answer(messages, handler, {'max_tokens': args.max_tokens})
        _ = answers | 'WriteAnswers' >> beam.io.WriteToPubSub(args.output_topic)
        _ = errors | 'WriteErrors' >> beam.io.WriteToPubSub(args.error_topic)
    return 0


def answer(
    messages: beam.PCollection[bytes], handler: VLLMChatModelHandler, inference_args: Row
) -> tuple[beam.PCollection[bytes], beam.PCollection[bytes]]:
    """The answers to messages, and what has none; all that is between the source and the sinks."""
    rows, unreadable = messages | 'Parse' >> beam.Map(parse).with_exception_handling(
        exc_class=ValueError
    )
    answered, failed = (
        rows
        | 'Prompt' >> beam.Map(lambda row: (row, conversation(row)))
        | 'Ask' >> RunInference(KeyedModelHandler(handler), inference_args=inference_args)
        | 'Split' >> SplitErrors()
    )
    errors = (
        unreadable | 'Unreadable' >> beam.Map(unreadable_message),
        failed | 'Failed' >> beam.Map(failed_message),
    )
    return answered | 'Answer' >> beam.Map(answer_message), errors | 'Errors' >> beam.Flatten()


def make_handler(args: argparse.Namespace) -> VLLMChatModelHandler:
    """The model handler that the arguments describe.

    Raises:
      ConfigurationError: They cannot work, alone or together.
    """
    return VLLMChatModelHandler(
        args.model,
        use_dynamo=True,
        dynamo_runtime_config=DynamoRuntimeConfig.for_devices(
            num_engines=args.dynamo_engines, engine_kind=args.engine_kind
        ),
        max_batch_duration_secs=args.max_batch_duration_secs,
        on_error='return',  # a message that fails must not come again and again
    )


def parse(message: bytes) -> Row:
    """The row of a message.

    Raises:
      ValueError: It is no JSON object with a prompt.
    """
    row = json.loads(message)
    if not isinstance(row, dict) or not isinstance(row.get('prompt'), str):
        raise ValueError('it must be a JSON object with a "prompt"')  # noqa: TRY004 - of a message
    return row


def conversation(row: Row) -> list[OpenAIChatMessage]:
    """What the model is asked about a row."""
    return [OpenAIChatMessage('user', row['prompt'])]


def answer_message(answered: tuple[Row, PredictionResult]) -> bytes:
    """The row with its completion."""
    row, result = answered
    response: Any = result.inference
    return json.dumps(row | {'completion': response.choices[0].message.content}).encode()


def failed_message(failed: tuple[Row, PredictionResult]) -> bytes:
    """A row without an answer, and why it has none."""
    row, result = failed
    return json.dumps({'message': json.dumps(row), 'error': str(result.inference)}).encode()


def unreadable_message(failure: tuple[bytes, tuple[type, str, list[str]]]) -> bytes:
    """A message that holds no prompt, and what is wrong with it."""
    message, (_, error, _) = failure
    return json.dumps({'message': message.decode(errors='replace'), 'error': error}).encode()


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = argparse.ArgumentParser(
        description='Answer the messages of a Pub/Sub topic, as they come.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--model', required=True, help='a hub name, or a directory that the workers can read')
    add('--input_subscription', required=True, help='projects/PROJECT/subscriptions/NAME')
    add('--output_topic', required=True, help='projects/PROJECT/topics/NAME')
    add('--error_topic', required=True, help='the same for what has no answer')
    add('--max_tokens', type=int, default=128, help='of each completion; default: %(default)s')
    add('--max_batch_duration_secs', type=float, default=0.5, help='default: %(default)s')
    add('--dynamo_engines', type=int, help='engines on each worker; default: one for each GPU')
    add('--engine_kind', choices=('gpu', 'cpu', 'simulated'), default='gpu')
    return parser


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    sys.exit(main())
