"""What is counted, and the warning about a cache that nothing hits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from openai.types import Completion

from apache_beam_vllm_dynamo import (
    ErrorKind,
    InferenceError,
    LLMInference,
    VLLMCompletionsModelHandler,
    _model_server,
    _probes,
    _reuse,
)
from apache_beam_vllm_dynamo._metrics import NAMESPACE, InferenceMetrics
from apache_beam_vllm_dynamo._model_server import _VLLMModelServer
from apache_beam_vllm_dynamo._requests import Endpoint, PreparedRequest, RequestBuilder
from apache_beam_vllm_dynamo._responses import Answer, Failure, Outcome
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._retry import RetryReason
from apache_beam_vllm_dynamo._reuse import ReuseWatch
from tests.support.stacks import MODEL, simulated, started

pytestmark = pytest.mark.usefixtures('nothing_left')

BUILDER = RequestBuilder('model', Endpoint.COMPLETIONS)
LONG = 'x' * _reuse.PREFIX_BYTES


def answer(at_ms: int = 1000, cached: int | None = 0, **fields: Any) -> Answer:
    details = None if cached is None else {'cached_tokens': cached}
    usage = {
        'prompt_tokens': 7,
        'completion_tokens': 3,
        'total_tokens': 10,
        'prompt_tokens_details': details,
    }
    response = Completion.model_validate(
        {
            'id': 'c',
            'created': 0,
            'model': 'm',
            'object': 'text_completion',
            'choices': [{'index': 0, 'text': 't', 'finish_reason': 'length', 'logprobs': None}],
            'usage': usage,
        }
    )
    return Answer(
        response,
        latency_s=fields.get('latency_s', 0.25),
        queue_s=0.5,
        attempts=1 + len(fields.get('retried', ())),
        retried=fields.get('retried', ()),
        completed_at_ms=at_ms,
    )


def failed(kind: ErrorKind) -> Failure:
    return Failure(InferenceError(kind, None, 'text'), 0.0, 0.0, 1, (), 1000)


class _Record(beam.DoFn):
    def process(self, outcomes: Sequence[Outcome]) -> Iterator[None]:
        metrics = InferenceMetrics()
        metrics.record(outcomes)
        metrics.record_restarts(2)
        metrics.record_migrations(3)
        yield None


def test_everything_that_happened_is_counted_in_one_namespace() -> None:
    outcomes = [
        answer(at_ms=1000, cached=4, retried=(RetryReason.TIMEOUT, RetryReason.CONNECT)),
        answer(at_ms=3000, cached=None, latency_s=0.75),
        failed(ErrorKind.PROMPT_TOO_LONG),
        failed(ErrorKind.OVERLOADED),
        failed(ErrorKind.OVERLOADED),
    ]
    with beam.Pipeline(options=PipelineOptions(['--runner=FnApiRunner'])) as pipeline:
        _ = pipeline | beam.Create([outcomes], reshuffle=False) | beam.ParDo(_Record())
    found = pipeline.result.metrics().query(beam.metrics.MetricsFilter().with_namespace(NAMESPACE))
    assert {m.key.metric.name: m.committed for m in found['counters']} == {
        'prompt_tokens': 14,
        'completion_tokens': 6,
        'cached_prompt_tokens': 4,
        'finish_reason_length': 2,
        'retried_requests': 2,
        'failed_prompt_too_long': 1,
        'failed_overloaded': 2,
        'engine_restarts': 2,
        'migrated_requests': 3,
    }
    spread = {
        m.key.metric.name: (m.committed.min, m.committed.max, m.committed.count)
        for m in found['distributions']
    }
    assert spread == {
        'request_latency_ms': (250, 750, 2),
        'request_queue_time_ms': (500, 500, 2),
        'inference_wall_clock_ms': (1000, 3000, 2),
    }


@dataclasses.dataclass
class Counting:
    """A runtime whose frontend counts migrations."""

    total: int | None = 0
    window: int = 1

    def start(self) -> None:
        pass

    def endpoint(self) -> str:
        return ''

    kv_caches = 1

    def statuses(self) -> tuple[ChildStatus, ...]:
        return ()

    def migrations(self) -> int | None:
        return self.total

    def close(self, reason: str = 'closed') -> None:
        pass


def test_a_migration_is_counted_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_model_server, 'MIGRATIONS_EVERY_S', 0.0)
    runtime = Counting(total=4)
    model = _VLLMModelServer(runtime)
    assert (model.take_migrations(), model.take_migrations()) == (4, 0)
    runtime.total = None
    assert model.take_migrations() == 0
    runtime.total = 6
    assert model.take_events() == (0, 2)
    runtime.total = 1  # another frontend
    assert model.take_migrations() == 1
    model.close()


def test_the_frontend_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_model_server, 'MIGRATIONS_EVERY_S', 3600.0)
    runtime = Counting(total=4)
    model = _VLLMModelServer(runtime)
    assert model.take_migrations() == 4
    runtime.total = 9
    assert model.take_migrations() == 0
    model.close()


def test_the_frontends_count_of_migrations_is_read() -> None:
    with started(simulated(1)) as runtime:
        assert runtime.migrations() == 0
    assert runtime.migrations() is None
    assert _probes.migrations(1) is None


def test_migrations_of_all_kinds_and_models_are_summed() -> None:
    text = (
        b'# TYPE dynamo_frontend_model_migration_total counter\n'
        b'dynamo_frontend_model_migration_total{model="a b",migration_type="new_request"} 2\n'
        b'dynamo_frontend_model_migration_total{model="a b",migration_type="ongoing_request"} 3e0\n'
        b'dynamo_frontend_model_migration_limit{model="a b"} 9\n'
    )
    assert _probes.count_of_migrations(text) == 5


def build(prompt: str) -> PreparedRequest:
    request = BUILDER.build(prompt)
    assert isinstance(request, PreparedRequest)
    return request


def warned(
    caplog: pytest.LogCaptureFixture, requests: Sequence[PreparedRequest], outcomes: Sequence[Any]
) -> int:
    watch = ReuseWatch()
    with caplog.at_level(logging.WARNING):
        for request, outcome in zip(requests, outcomes, strict=True):
            watch.note([request], [outcome])
    return len([r for r in caplog.records if r.name.endswith('_reuse')])


def test_prompts_that_begin_alike_and_reuse_nothing_are_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    requests = [build(f'{LONG} {i}') for i in range(500)]
    assert warned(caplog, requests, [answer(at_ms=1000 * i) for i in range(500)]) == 1
    assert LONG[:50] not in caplog.text


@pytest.mark.parametrize(
    ('prompt', 'outcome'),
    [
        pytest.param(lambda i: f'{i} {LONG}', lambda i: answer(1000 * i), id='nothing shared'),
        pytest.param(lambda i: f'short {i}', lambda i: answer(1000 * i), id='short prompts'),
        pytest.param(
            lambda i: f'{LONG} {i}', lambda i: answer(1000 * i, cached=i == 50), id='one reused'
        ),
        pytest.param(lambda i: f'{LONG} {i}', lambda _: answer(1000), id='all sent at once'),
        pytest.param(
            lambda i: f'{LONG} {i}', lambda _: failed(ErrorKind.OVERLOADED), id='no answers'
        ),
    ],
)
def test_nothing_is_said_without_cause(
    caplog: pytest.LogCaptureFixture, prompt: Any, outcome: Any
) -> None:
    requests = [build(prompt(i)) for i in range(500)]
    assert warned(caplog, requests, [outcome(i) for i in range(500)]) == 0


@pytest.mark.parametrize(
    ('blocks', 'expected'), [pytest.param(60, 1, id='too small'), pytest.param(4096, 0, id='whole')]
)
def test_a_cache_too_small_for_the_prompts_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, blocks: int, expected: int
) -> None:
    monkeypatch.setattr(_reuse, '_watches', {})
    flags = {'speedup-ratio': 1000, 'num-gpu-blocks-override': blocks}
    handler = VLLMCompletionsModelHandler(
        MODEL,
        use_dynamo=True,
        dynamo_runtime_config=simulated(1, simulation_kwargs=flags),
        max_in_flight=1,
        order_by_prefix=False,
    )
    # In turn, so that each has pushed the others out before its own comes again.
    prompts = [f'{i % 8} {"begins all of these alike " * 100} {i}' for i in range(160)]
    with (
        caplog.at_level(logging.WARNING),
        beam.Pipeline(options=PipelineOptions(['--runner=FnApiRunner'])) as pipeline,
    ):
        _ = pipeline | beam.Create(prompts) | LLMInference(handler, {'max_tokens': 1})
    assert caplog.text.count('no engine reused a token') == expected
