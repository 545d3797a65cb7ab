"""The ways to put the same prompts to the same engines, each through a Beam pipeline.

The pipelines run on as many workers as a load has. A worker is a thread of this process where
there is one, and an SDK process of its own where there are more; what it saw goes to a file.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import apache_beam as beam
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    InferenceError,
    LLMInference,
    PrefixBatchElements,
)
from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo.config import RouterMode
from benchmarks._arms import BLOCK_TOKENS, CPU_ENV, CPU_FLAGS
from benchmarks._prefix_loads import Load, Prompt
from benchmarks._served import BeamsOnServed, OursOnServed, Served, serving
from tools.small_model import FULL_DIRECTORY, TOKENIZER_DIRECTORY

Arm = Literal['rr_shuffled', 'kv', 'ordered', 'transform', 'beam_rr']
ARMS: tuple[Arm, ...] = get_args(Arm)

_CPU_FLAGS: dict[str, ServerArgument] = {**CPU_FLAGS, 'max-model-len': 2048, 'max-num-seqs': 16}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one arm did.

    Attributes:
      records_per_s: Answers a second, from the first record's arrival at the arm to the last
        answer.
      cached_share: Of all prompt tokens, how many an engine had.
      failed: How many records have no answer.
      engine_share_max_over_min: Requests of the busiest engine over those of the idlest.
    """

    records_per_s: float
    cached_share: float
    failed: int
    engine_share_max_over_min: float


def measure(arm: Arm, load: Load, prompts: Sequence[Prompt]) -> Measured:
    """Runs an arm over prompts, on engines that have seen none."""
    per_worker = load.engines // load.workers
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = [
            stack.enter_context(serving(_model(load), _config(arm, load, per_worker))).endpoint()
            for _ in range(load.workers)
        ]
        served = Served(
            urls[0], load.in_flight, kv_caches=per_worker, others=urls[1:], claims=directory
        )
        _run(_elements(arm, load), _inference(arm, load, served), prompts, load, directory)
        return _measured(directory, load)


def _config(arm: Arm, load: Load, engines: int) -> DynamoRuntimeConfig:
    router_mode: RouterMode = 'round-robin' if arm in ('rr_shuffled', 'beam_rr') else 'kv'
    if load.engine_kind == 'cpu':
        spec = DynamoVLLMEngineSpec(vllm_server_kwargs=_CPU_FLAGS, env=CPU_ENV)
        return DynamoRuntimeConfig(
            (spec,) * engines, engine_kind='cpu', router_mode=router_mode, start_timeout_secs=300
        )
    return DynamoRuntimeConfig.for_devices(
        num_engines=engines,
        engine_kind='simulated',
        router_mode=router_mode,
        vllm_server_kwargs={
            'num-gpu-blocks-override': load.cache_blocks,
            'block-size': BLOCK_TOKENS['simulated'],
        },
    )


def _model(load: Load) -> str:
    return str(TOKENIZER_DIRECTORY if load.engine_kind == 'simulated' else FULL_DIRECTORY)


def _elements(arm: Arm, load: Load) -> beam.PTransform[Any, Any]:
    """What comes before the inference."""
    if arm == 'transform':
        return PrefixBatchElements() if load.in_batches else _Met()
    if arm == 'beam_rr':
        return _Lists()
    # Otherwise one worker would read, and ask about, everything.
    return beam.Reshuffle() if load.workers > 1 else beam.Map(_same)


class _Met(beam.PTransform[Any, Any]):
    """Brings prompts that begin alike together, and gives them one by one."""

    def expand(self, prompts: Any) -> Any:
        return prompts | PrefixBatchElements() | beam.FlatMap()


class _Lists(beam.PTransform[Any, Any]):
    """Spreads prompts over the workers, as lists, the only ids that Beam's handler can send."""

    def expand(self, prompts: Any) -> Any:
        return prompts | beam.Reshuffle() | beam.Map(list)


def _inference(arm: Arm, load: Load, served: Served) -> beam.PTransform[Any, Any]:
    arguments = {
        'max_tokens': load.output_tokens,
        'extra_body': {'nvext': {'extra_fields': ['worker_id']}},
    }
    if arm == 'beam_rr':
        # Its default batches grow from 1; this one fills what may be in flight at once.
        handler = BeamsOnServed(_model(load), served, load.in_flight)
        return RunInference(handler, inference_args=arguments)
    ours = OursOnServed(
        _model(load),
        served,
        max_in_flight=load.in_flight,
        order_by_prefix=arm in ('ordered', 'transform'),
        on_error='return',
    )
    if not load.in_batches:
        return LLMInference(ours, arguments)
    return RunInference(
        ours.with_no_batching() if arm == 'transform' else ours, inference_args=arguments
    )


# The pipeline.


class _Noted(beam.DoFn):
    """Writes down when records come by, in a file for each instance."""

    def __init__(self, directory: str, *, answers: bool) -> None:
        self._directory = directory
        self._answers = answers
        self._rows: list[dict[str, Any]] = []

    def process(self, element: Any) -> Iterator[Any]:
        row: dict[str, Any] = {'at': time.time()}
        if self._answers:
            row |= _usage(element)
        self._rows.append(row)
        yield element

    def finish_bundle(self) -> None:
        name = 'answers' if self._answers else 'records'
        path = pathlib.Path(self._directory, f'{name}-{os.getpid()}-{id(self)}.jsonl')
        with path.open('a') as file:
            file.writelines(json.dumps(row) + '\n' for row in self._rows)
        self._rows = []


def _usage(result: PredictionResult) -> dict[str, Any]:
    inference: Any = result.inference
    if isinstance(inference, InferenceError):
        return {'error': str(inference.kind)}
    details = inference.usage.prompt_tokens_details
    nvext = (inference.model_extra or {}).get('nvext') or {}
    return {
        'prompt_tokens': inference.usage.prompt_tokens,
        'cached_tokens': (details.cached_tokens if details is not None else 0) or 0,
        'engine': json.dumps(nvext.get('worker_id')),
    }


def _run(
    before: beam.PTransform[Any, Any],
    inference: beam.PTransform[Any, Any],
    prompts: Sequence[Prompt],
    load: Load,
    directory: pathlib.Path,
) -> None:
    name = os.fspath(directory)
    with beam.Pipeline(options=_options(load.workers)) as pipeline:
        _ = (
            pipeline
            | beam.Create(prompts)
            | 'Arrive' >> beam.ParDo(_Noted(name, answers=False))
            | 'Before' >> before
            | 'Ask' >> inference
            | 'Answer' >> beam.ParDo(_Noted(name, answers=True))
        )


def _options(workers: int) -> PipelineOptions:
    flags = ['--runner=FnApiRunner']
    if workers > 1:
        flags += ['--direct_running_mode=multi_processing', f'--direct_num_workers={workers}']
    return PipelineOptions(flags)


def _same(element: object) -> object:
    return element


def _measured(directory: pathlib.Path, load: Load) -> Measured:
    first = min(row['at'] for row in _rows(directory, 'records'))
    answers = [row for row in _rows(directory, 'answers') if 'error' not in row]
    seconds = max(row['at'] for row in answers) - first
    tokens = sum(row['prompt_tokens'] for row in answers)
    cached = sum(row['cached_tokens'] for row in answers)
    engines = collections.Counter(row['engine'] for row in answers)
    return Measured(
        records_per_s=len(answers) / seconds,
        cached_share=cached / tokens,
        failed=load.requests - len(answers),
        engine_share_max_over_min=(
            max(engines.values()) / min(engines.values())
            if len(engines) == load.engines
            else float('inf')  # an engine had nothing to do
        ),
    )


def _rows(directory: pathlib.Path, name: str) -> Iterator[dict[str, Any]]:
    for path in directory.glob(f'{name}-*.jsonl'):
        with path.open() as file:
            yield from map(json.loads, file)
