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
    RuntimeFailedError,
    VLLMCompletionsModelHandler,
    _prefix_census,
    _probes,
    _reuse,
    _runtime,
)
from apache_beam_vllm_dynamo._metrics import NAMESPACE, InferenceMetrics
from apache_beam_vllm_dynamo._model_server import _VLLMModelServer
from apache_beam_vllm_dynamo._prefix_census import PrefixCensus
from apache_beam_vllm_dynamo._requests import Endpoint, PreparedRequest, RequestBuilder
from apache_beam_vllm_dynamo._responses import Answer, Failure, Outcome
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._retry import RetryReason
from apache_beam_vllm_dynamo._reuse import ReuseWatch
from tests.support.stacks import MODEL, complete, simulated, started

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
        metrics.record([build(LONG)] * len(outcomes), outcomes)
        metrics.count({'engine_restarts': 2, 'migrated_requests': 3, 'requests_of_engine_1': 0})
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
        'distinct_prefixes': 1,
        'cacheable_prompt_tokens': 7,
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
    """A runtime whose servers count."""

    totals: dict[str, int]
    identity: str = 'counting'
    description: str = 'it'
    window: int = 1
    kv_caches: int = 1
    ending: bool = False
    failure: RuntimeFailedError | None = None

    def start(self, hold_fds: Sequence[int] = ()) -> None:
        pass

    def endpoint(self) -> str:
        return ''

    def statuses(self) -> tuple[ChildStatus, ...]:
        return ()

    def counts(self) -> dict[str, int]:
        return self.totals

    def close(self, reason: str = 'closed') -> None:
        pass


def test_an_event_is_counted_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runtime, 'COUNTS_EVERY_S', 0.0)
    runtime = Counting({'migrated_requests': 4, 'requests_of_engine_1': 10})
    model = _VLLMModelServer(lambda: runtime)
    assert model.take_events() == {'migrated_requests': 4, 'requests_of_engine_1': 10}
    assert model.take_events() == {}
    runtime.totals = {'requests_of_engine_1': 12}  # the frontend does not answer
    assert model.take_events() == {'requests_of_engine_1': 2}
    runtime.totals = {'migrated_requests': 1, 'requests_of_engine_1': 3}  # both were replaced
    assert model.take_events() == {'migrated_requests': 1, 'requests_of_engine_1': 3}
    model.close()


def test_the_servers_are_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runtime, 'COUNTS_EVERY_S', 3600.0)
    runtime = Counting({'migrated_requests': 4})
    model = _VLLMModelServer(lambda: runtime)
    assert model.take_events() == {'migrated_requests': 4}
    runtime.totals = {'migrated_requests': 9}
    assert model.take_events() == {}
    model.close()


def test_the_counts_of_frontend_and_engines_are_read() -> None:
    with started(simulated(2)) as runtime:
        before = runtime.counts()
        for number in range(6):
            complete(runtime.endpoint(), f'prompt {number}')
        new = {name: count - before[name] for name, count in runtime.counts().items()}
    assert new.pop('migrated_requests') == 0
    assert set(new) == {'requests_of_engine_1', 'requests_of_engine_2'}
    assert sum(new.values()) == 6
    assert runtime.counts() == {}
    assert _probes.migrations(1) is None


def test_migrations_of_all_kinds_and_models_are_summed() -> None:
    text = (
        b'# TYPE dynamo_frontend_model_migration_total counter\n'
        b'dynamo_frontend_model_migration_total{model="a b",migration_type="new_request"} 2\n'
        b'dynamo_frontend_model_migration_total{model="a b",migration_type="ongoing_request"} 3e0\n'
        b'dynamo_frontend_model_migration_limit{model="a b"} 9\n'
    )
    assert _probes.sum_of(_probes._MIGRATIONS, text) == 5


def test_what_could_have_been_cached_is_counted_in_pieces_of_the_prompts() -> None:
    census = PrefixCensus()
    prompt = bytes(range(256)) * 16  # of 4,096 bytes
    assert census.seen_share(prompt) == 0
    assert census.seen_share(prompt) == 1
    assert census.seen_share(prompt[:2048] + b'x' * 2048) == 0.5
    assert census.seen_share(b'y' + prompt) == 0  # a prefix counts from the beginning only
    assert census.seen_share(prompt[:1300]) == 1280 / 1300
    assert census.seen_share(b'') == 0


def test_the_memory_of_what_was_seen_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_prefix_census, 'REMEMBERED_PIECES', 100)
    census = PrefixCensus()
    first = b'first' * 1000
    census.seen_share(first)
    for number in range(500):
        census.seen_share(f'{number:05}'.encode() * 1000)
        assert len(census._recent) + len(census._older) <= 220
    assert census.seen_share(first) == 0


def test_a_bundle_says_what_came_of_its_prefixes(caplog: pytest.LogCaptureFixture) -> None:
    metrics = InferenceMetrics()
    with caplog.at_level(logging.DEBUG, 'apache_beam_vllm_dynamo._metrics'):
        metrics.count(
            {
                'prompt_tokens': 1000,
                'cached_prompt_tokens': 500,
                'cacheable_prompt_tokens': 600,
                'distinct_prefixes': 3,
                'requests_of_engine_10': 7,
                'requests_of_engine_2': 5,
            }
        )
        metrics.end_bundle()
        metrics.end_bundle()  # nothing happened since
    [record] = caplog.records
    assert record.getMessage() == (
        '1000 prompt tokens, of which 50.0% were cached and 60.0% could be; 3 new prefixes; '
        'requests since last counted: 5 by engine 2, 7 by engine 10'
    )


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
