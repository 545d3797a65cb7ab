"""The four ways to put the same prompts to the same server, each timed the same way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import aiohttp
import apache_beam as beam
from apache_beam.ml.inference import vllm_inference as upstream
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import CompletionRequest, InferenceError, LLMInference
from benchmarks._served import BeamsOnServed, OursOnServed, Served

Driver = Literal['ours', 'transform', 'beam', 'limit']

OK = 200


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes:
      model: The name of the model.
      served: The server.
      prompts: One for each record, all different.
      max_tokens: How many tokens each answer has, all the same or one number for each.
    """

    model: str
    served: Served
    prompts: Sequence[str]
    max_tokens: int | Sequence[int]

    def first(self, records: int) -> Load:
        """The same with fewer records."""
        lengths = self.max_tokens
        return dataclasses.replace(
            self,
            prompts=self.prompts[:records],
            max_tokens=lengths if isinstance(lengths, int) else lengths[:records],
        )

    def lengths(self) -> Sequence[int]:
        """How many tokens each answer has."""
        if isinstance(self.max_tokens, int):
            return [self.max_tokens] * len(self.prompts)
        return self.max_tokens


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one driver did.

    Attributes:
      records: How many records were asked about.
      seconds: From the first record's arrival at the driver to the last result.
      cpu_seconds: What this process computed meanwhile, Beam's runner included.
      failed: How many records have no answer.
    """

    records: int
    seconds: float
    cpu_seconds: float
    failed: int

    @property
    def records_per_s(self) -> float:
        """The throughput."""
        return self.records / self.seconds

    @property
    def cpu_ms_per_request(self) -> float:
        """What a request costs on the client's side."""
        return self.cpu_seconds / self.records * 1000


def measure(driver: Driver, load: Load, batch_size: int | None) -> Measured:
    """Runs one driver over a load.

    Args:
      driver: Which.
      load: What to ask.
      batch_size: Elements of a batch; ``None`` for our handler's defaults and for a limit
        with all of the server's window.
    """
    gc.collect()
    if driver == 'limit':
        return asyncio.run(_bare(load, batch_size, bounded=True))
    if driver == 'beam':
        assert batch_size is not None
        return _beams(load, batch_size)
    sizes = {'min_batch_size': batch_size, 'max_batch_size': batch_size}
    handler = OursOnServed(
        load.model,
        load.served,
        max_in_flight=load.served.window(),
        on_error='return',
        **(sizes if batch_size is not None else _default_sizes(load.served.window())),
    )
    make = LLMInference if driver == 'transform' else RunInference
    if isinstance(load.max_tokens, int):
        arguments = {'max_tokens': load.max_tokens}
        return _pipeline(load.prompts, make(handler, inference_args=arguments))
    requests = [
        CompletionRequest(prompt, {'max_tokens': length})
        for prompt, length in zip(load.prompts, load.max_tokens, strict=True)
    ]
    return _pipeline(requests, make(handler))


def measure_unbounded(load: Load) -> Measured:
    """The limit with every record in flight at once."""
    gc.collect()
    return asyncio.run(_bare(load, None, bounded=False))


# Beam pipelines.


@dataclasses.dataclass
class _Clock:
    """What the stages around a driver saw; a runner in this process fills this very object."""

    first: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    last: tuple[float, float] = (0.0, 0.0)
    results: int = 0
    failed: int = 0


_clock = _Clock()


def _arrived(element: object) -> object:
    if not _clock.first:
        _clock.first.append((time.perf_counter(), time.process_time()))
    return element


def _answered(result: PredictionResult) -> None:
    _clock.results += 1
    _clock.failed += isinstance(result.inference, InferenceError)
    _clock.last = time.perf_counter(), time.process_time()


def _pipeline(elements: Sequence[Any], driver: beam.PTransform[Any, Any]) -> Measured:
    _clock.__init__()  # type: ignore[misc]  # the stages hold this very object
    with contextlib.suppress(_DRIVER_FAILED), beam.Pipeline(options=_IN_PROCESS) as pipeline:
        _ = (
            pipeline
            | beam.Create(elements)
            | 'Arrive' >> beam.Map(_arrived)
            | driver
            | 'Answer' >> beam.Map(_answered)
        )
    [(first_s, first_cpu_s)] = _clock.first
    return Measured(
        len(elements),
        _clock.last[0] - first_s,
        _clock.last[1] - first_cpu_s,
        _clock.failed + len(elements) - _clock.results,
    )


_IN_PROCESS = PipelineOptions(['--runner=FnApiRunner'])
# The runner wraps what a driver raises; such a run is reported by its failed records.
_DRIVER_FAILED = RuntimeError


def _beams(load: Load, batch_size: int) -> Measured:
    handler = BeamsOnServed(load.model, load.served, batch_size)
    if isinstance(load.max_tokens, int):
        arguments = {'max_tokens': load.max_tokens}
        return _pipeline(load.prompts, RunInference(handler, inference_args=arguments))
    # Its elements have no arguments of their own, so its client adds each prompt's length.
    lengths = dict(zip(load.prompts, load.max_tokens, strict=True))
    with _lengths_added(lengths):
        return _pipeline(load.prompts, RunInference(handler))


@contextlib.contextmanager
def _lengths_added(lengths: Mapping[str, int]) -> Iterator[None]:
    new_client = upstream.getAsyncVLLMClient

    def client(port: int) -> Any:
        made: Any = new_client(port)
        create: Callable[..., Any] = made.completions.create

        def create_with_length(*, prompt: str, **arguments: Any) -> Any:
            return create(prompt=prompt, max_tokens=lengths[prompt], **arguments)

        made.completions.create = create_with_length
        return made

    upstream.getAsyncVLLMClient = client
    try:
        yield
    finally:
        upstream.getAsyncVLLMClient = new_client


def _default_sizes(window: int) -> dict[str, int]:
    """What our handler's batch sizes are by default with engines of this window."""
    handler = OursOnServed('m', Served('', window), max_in_flight=window)
    sizes = handler.batch_elements_kwargs()
    return {name: sizes[name] for name in ('min_batch_size', 'max_batch_size')}


# The limit: aiohttp and nothing else.


async def _bare(load: Load, batch_size: int | None, *, bounded: bool) -> Measured:
    url = f'{load.served.endpoint()}/v1/completions'
    failed = 0
    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    headers = {'Content-Type': 'application/json'}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def ask(prompt: str, length: int) -> None:
            nonlocal failed
            body = json.dumps({'model': load.model, 'prompt': prompt, 'max_tokens': length})
            async with session.post(url, data=body) as response:
                answer = json.loads(await response.read())
                failed += response.status != OK or not answer['choices']

        records = list(zip(load.prompts, load.lengths(), strict=True))
        left = iter(records)

        async def worker() -> None:
            for record in left:
                await ask(*record)

        started, cpu = time.perf_counter(), time.process_time()
        if batch_size is not None:
            for start in range(0, len(records), batch_size):
                batch = records[start : start + batch_size]
                await asyncio.gather(*(ask(*record) for record in batch))
        else:
            workers = load.served.window() if bounded else len(records)
            await asyncio.gather(*(worker() for _ in range(workers)))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return Measured(len(records), seconds, cpu, failed)
