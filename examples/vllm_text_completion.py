"""Answer every prompt of a file with a large language model, in a Beam pipeline.

    python -m examples.vllm_text_completion --model Qwen/Qwen3-0.6B --chat --use_dynamo \
        --dynamo_engines 2 --input prompts.jsonl --output answers

The input is a text file with a prompt on each line, or, where its name ends in ``.jsonl`` or
``.jsonl.gz``, a file of JSON objects: ``{"prompt": "…"}``, or ``{"messages": […]}`` with
``--chat``. It may be a pattern, and lie anywhere that Beam reads. Blank lines are skipped.

The output has a JSON object for each line of input, in no order. It holds what the object of
the input held, and over that ``completion``, ``finish_reason``, ``prompt_tokens``,
``cached_tokens``, ``completion_tokens`` and ``error``. A prompt without an answer stays in the
output and does not fail the job: its ``error`` says why, which is null for all others. With
``--dynamo_name_engine`` the lines with an answer also hold ``engine``, the number that Dynamo gave
the engine that wrote it.

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
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import MetricsFilter
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineResult

from apache_beam_vllm_dynamo import (
    ConfigurationError,
    DynamoRuntimeConfig,
    InferenceError,
    OpenAIChatMessage,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
)

Row = dict[str, Any]
Handler = VLLMChatModelHandler | VLLMCompletionsModelHandler

NAMESPACE = 'BeamML_vLLM_Dynamo'  # of the handlers' metrics

# What the output has in every line, beside what the input had.
NO_ANSWER: Row = {
    'completion': None,
    'finish_reason': None,
    'prompt_tokens': None,
    'cached_tokens': None,
    'completion_tokens': None,
    'error': None,
}

PROMPTS = (
    'What is the capital of France?',
    'Name three primary colors.',
    'How many days are in a week?',
    'Write one sentence about the sea.',
    'What do bees make?',
    'Which planet is closest to the sun?',
    'What is the boiling point of water in degrees Celsius?',
    'Name an animal that lives in the desert.',
    'What is the opposite of cold?',
    'How many legs does a spider have?',
    'Write one sentence about a winter morning.',
    'Which language is spoken in Brazil?',
    'What comes after Wednesday?',
    'Name a fruit that is yellow.',
    'What is seven times six?',
    'Which instrument has eighty-eight keys?',
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline that ``argv``, the arguments without the program's name, describes."""
    parser = make_parser()
    args, pipeline_args = parser.parse_known_args(argv)
    inference_args: dict[str, Any] = {'max_tokens': args.max_tokens}
    if args.dynamo_name_engine:
        inference_args['extra_body'] = {'nvext': {'extra_fields': ['worker_id']}}
    try:  # whatever can be found wrong before machines are rented for the job
        handler = make_handler(args)
        handler.validate_inference_args(inference_args)
        if args.input is not None:
            check_input(args.input, chat=args.chat)
    except ValueError as error:  # which a ConfigurationError is, too
        parser.error(str(error))

    parse = parse_json if args.input is not None and is_jsonl(args.input) else parse_text
    source = beam.Create(PROMPTS) if args.input is None else beam.io.ReadFromText(args.input)
    with beam.Pipeline(options=PipelineOptions(pipeline_args)) as pipeline:
        rows, unreadable = (
            pipeline
            | 'Read' >> source
            | 'SkipBlank' >> beam.Filter(str.strip)
            | 'Parse' >> beam.Map(parse, args.chat).with_exception_handling(exc_class=ValueError)
        )
        answers = ask(rows, handler, inference_args, accelerator=args.accelerator)
        answered = answers | 'Record' >> beam.Map(to_record)
        failures = unreadable | 'RecordUnreadable' >> beam.Map(to_unreadable_record)
        _ = (
            (answered, failures)
            | beam.Flatten()
            | 'Encode' >> beam.Map(json.dumps)
            | 'Write' >> beam.io.WriteToText(args.output, file_name_suffix='.jsonl')
        )
    if args.metrics_output is not None:
        write_metrics(pipeline.result, args.metrics_output)
    return 0


def ask(
    rows: beam.PCollection[Row],
    handler: Handler,
    inference_args: dict[str, Any],
    *,
    accelerator: str | None = None,
) -> beam.PCollection[tuple[Row, PredictionResult]]:
    """Put the prompt of each row to the model, and keep the row beside the answer."""
    chat = isinstance(handler, VLLMChatModelHandler)
    inference = RunInference(KeyedModelHandler(handler), inference_args=inference_args)
    hints = {'accelerator': accelerator} if accelerator is not None else {}
    answers: beam.PCollection[tuple[Row, PredictionResult]] = (
        rows
        | 'Prompt' >> beam.Map(lambda row: (row, to_element(row, chat)))
        | 'Ask' >> inference.with_resource_hints(**hints)
    )
    return answers


def make_handler(args: argparse.Namespace) -> Handler:
    """The model handler that the arguments describe.

    Raises:
      ConfigurationError: They cannot work, alone or together.
    """
    flags = {
        'max-num-seqs': args.vllm_max_num_seqs,
        'gpu-memory-utilization': args.vllm_gpu_memory_utilization,
    }
    flags = {flag: value for flag, value in flags.items() if value is not None}
    flags |= args.vllm_server_kwargs or {}
    server: dict[str, Any] = {'vllm_server_kwargs': flags}
    if args.use_dynamo:
        server = {'use_dynamo': True, 'dynamo_runtime_config': make_config(args, flags)}
    else:
        for name, value in vars(args).items():
            if name.startswith(('dynamo_', 'engine_')) and value is not None:
                raise ConfigurationError(f'--{name} needs --use_dynamo.')
    if args.chat:
        return VLLMChatModelHandler(args.model, args.chat_template, on_error='return', **server)
    if args.chat_template is not None:
        raise ConfigurationError('--chat_template needs --chat.')
    return VLLMCompletionsModelHandler(args.model, on_error='return', **server)


def make_config(args: argparse.Namespace, flags: dict[str, Any]) -> DynamoRuntimeConfig:
    """The engines of each worker and the router before them."""
    devices = args.dynamo_gpu_devices.split(',') if args.dynamo_gpu_devices else None
    devices_per_engine = 1
    if devices and args.dynamo_engines:
        devices_per_engine = max(1, len(devices) // args.dynamo_engines)
    return DynamoRuntimeConfig.for_devices(
        num_engines=args.dynamo_engines,
        devices_per_engine=devices_per_engine,
        gpu_devices=devices,
        vllm_server_kwargs=flags,
        engine_kind=args.engine_kind or 'gpu',
        router_mode=args.dynamo_router_mode or 'kv',
        kv_event_mode=args.dynamo_kv_event_mode,
    )


def is_jsonl(path: str) -> bool:
    """Whether the lines of a file are JSON objects, by its name."""
    return path.endswith(('.jsonl', '.jsonl.gz'))


def check_input(pattern: str, *, chat: bool) -> None:
    """Look at the first line of the input, where a wrong path or a wrong key shows.

    Raises:
      ValueError: There is no such file, or the line holds no prompt.
    """
    [match] = FileSystems.match([pattern], limits=[1])
    if not match.metadata_list:
        raise ValueError(f'--input: there is no file {pattern}')
    if is_jsonl(pattern):
        path = match.metadata_list[0].path
        with FileSystems.open(path) as file:
            first = next((line for line in iter(file.readline, b'') if line.strip()), None)
        try:
            if first is not None:
                parse_json(first.decode(), chat)
        except ValueError as error:
            raise ValueError(f'--input: the first line of {path}: {error}') from error


def parse_text(line: str, chat: bool) -> Row:  # noqa: ARG001, FBT001 - called like the other
    """A row whose prompt is the whole line."""
    return {'prompt': line}


def parse_json(line: str, chat: bool) -> Row:  # noqa: FBT001 - beam.Map calls it
    """The row on a line.

    Raises:
      ValueError: It is no JSON object with a prompt, or not all of it is text.
    """
    row = json.loads(line)
    keys = ('messages', 'prompt') if chat else ('prompt',)
    if not isinstance(row, dict) or not any(key in row for key in keys):
        wanted = ' or '.join(f'"{key}"' for key in keys)
        needs_chat = isinstance(row, dict) and 'messages' in row
        hint = '; "messages" needs --chat' if needs_chat else ''
        raise ValueError(f'it must be a JSON object with {wanted}{hint}')
    # JSON may spell half of a surrogate pair, which Beam cannot hand on to the next step.
    json.dumps(row, ensure_ascii=False).encode()
    return row


def to_element(row: Row, chat: bool) -> Any:  # noqa: FBT001 - called for each row alone
    """What the handler takes; it says itself what is wrong with a value it cannot use."""
    if not chat:
        return row['prompt']
    return row['messages'] if 'messages' in row else [OpenAIChatMessage('user', row['prompt'])]


def to_record(answered: tuple[Row, PredictionResult]) -> Row:
    """A row with what became of its prompt, for the output."""
    row, result = answered
    response: Any = result.inference
    if isinstance(response, InferenceError):
        return row | NO_ANSWER | {'error': str(response)}
    choice, usage = response.choices[0], response.usage
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    record: Row = {
        'completion': choice.message.content if hasattr(choice, 'message') else choice.text,
        'finish_reason': choice.finish_reason,
        'prompt_tokens': usage.prompt_tokens,
        'cached_tokens': cached or 0,
        'completion_tokens': usage.completion_tokens,
        'error': None,
    }
    worker = (getattr(response, 'nvext', None) or {}).get('worker_id')
    if worker:
        record['engine'] = str(worker.get('decode_worker_id'))
    return row | record


def to_unreadable_record(failure: tuple[str, tuple[type, str, list[str]]]) -> Row:
    """A line of the input that holds no prompt, for the output."""
    line, (_, error, _) = failure
    return {'line': line} | NO_ANSWER | {'error': f'unreadable line: {error}'}


def write_metrics(result: PipelineResult, path: str) -> None:
    """Write what the handler counted, all steps together, as a JSON object.

    A distribution is an object of its own, with its count, sum, min and max.
    """
    metrics = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
    found: Row = {}
    for counter in metrics['counters']:
        name = counter.key.metric.name
        found[name] = found.get(name, 0) + (counter.committed or 0)
    for distribution in metrics['distributions']:
        value = distribution.committed
        if value is not None:
            fields = ('count', 'sum', 'min', 'max')
            found[distribution.key.metric.name] = {f: getattr(value, f) for f in fields}
    with FileSystems.create(path, 'application/json') as file:
        file.write(json.dumps(found, indent=2, sort_keys=True).encode() + b'\n')


def json_object(text: str) -> Row:
    """A JSON object given as an argument."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is no JSON object')
    return value


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = argparse.ArgumentParser(
        description='Answer every prompt of a file with a large language model.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--model', required=True, help='a hub name, or a directory that the workers can read')
    add('--output', required=True, help='the files will be OUTPUT-00000-of-00001.jsonl and so on')
    add('--input', help='a text or .jsonl file or pattern; a few built-in prompts without it')
    add('--accelerator', help='the GPUs of the step that asks, where the runner gives out GPUs')
    add('--metrics_output', help='a JSON file for what was counted')
    add('--max_tokens', type=int, default=128, help='of each completion; default: %(default)s')
    add('--chat', action='store_true', help='send chat messages, not bare prompts')
    add('--chat_template', help="a template file to use over the model's own")
    add('--vllm_max_num_seqs', type=int, help='how many prompts an engine works on at once')
    add('--vllm_gpu_memory_utilization', type=float, help="an engine's share of its GPU's memory")
    example = '{"dtype": "half"}'
    add('--vllm_server_kwargs', type=json_object, help=f'further flags of the server: {example}')
    add('--use_dynamo', action='store_true', help="serve by NVIDIA Dynamo, not vLLM's own server")
    add('--dynamo_engines', type=int, help='engines on each worker; default: one for each GPU')
    add('--dynamo_gpu_devices', help='the GPUs to share out among the engines, such as 0,1')
    add('--dynamo_router_mode', choices=('kv', 'round-robin'), help='default: kv')
    events = ('zmq', 'approximate', 'disabled')
    add('--dynamo_kv_event_mode', choices=events, help='default: zmq with kv, else disabled')
    name_engine = 'say in each line which engine wrote the answer'
    add('--dynamo_name_engine', action='store_const', const=True, help=name_engine)
    add('--engine_kind', choices=('gpu', 'cpu', 'simulated'), help='default: gpu')
    return parser


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    sys.exit(main())
