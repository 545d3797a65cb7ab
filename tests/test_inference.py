"""The transform without a wait per batch, and the split of results from errors.

On simulated engines behind etcd, frontend and router, and where a test needs an answer that
comes late or never, on a fake server.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    KeyModelMapping,
    MaybeKeyedModelHandler,
    PredictionResult,
    RunInference,
)
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows, SlidingWindows, TimestampedValue

from apache_beam_vllm_dynamo import (
    CompletionRequest,
    ConfigurationError,
    ErrorKind,
    InferenceError,
    LLMInference,
    SplitErrors,
    VLLMCompletionsModelHandler,
    _sharing,
)
from tests.fake_server import FakeServer
from tests.support.pipelines import IN_PROCESS, collect, collected, our_metrics
from tests.support.stacks import MODEL, simulated

pytestmark = pytest.mark.usefixtures('nothing_left')

PROMPTS = [f'prompt number {i}' for i in range(200)]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


class OnServer:
    """A model whose server runs already."""

    def __init__(self, server: FakeServer, window: int) -> None:
        self._url = server.url
        self._window = window

    def server_id(self) -> str:
        return self._url

    def window(self) -> int:
        return self._window

    def kv_caches(self) -> int:
        return 1

    def endpoint(self) -> str:
        return self._url

    def take_events(self) -> dict[str, int]:
        return {}


# Handlers are pickled, so what they find on the way is kept here.
models: list[OnServer] = []


class OnServerHandler(VLLMCompletionsModelHandler):
    def load_model(self) -> Any:
        return models[-1]


def on_server(server: FakeServer, window: int = 8, **arguments: Any) -> OnServerHandler:
    models.append(OnServer(server, window))
    return OnServerHandler('model', use_dynamo=True, **arguments)


def completions(engines: int = 1, **arguments: Any) -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler(
        MODEL, use_dynamo=True, dynamo_runtime_config=simulated(engines), **arguments
    )


def run(elements: Sequence[object], *transforms: Any) -> tuple[list[Any], dict[str, Any]]:
    """Runs a pipeline in this process; what came out, and the committed metrics of ours."""
    collected.clear()
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        out: Any = pipeline | beam.Create(elements)
        for index, transform in enumerate(transforms):
            out = out | f'{index}' >> transform
        _ = out | 'collect' >> beam.Map(collect)
    return list(collected), our_metrics(pipeline.result)


def text(result: Any) -> Any:
    """The text of an answer, or the kind of error in its place."""
    inference = result.inference
    return inference.kind if isinstance(inference, InferenceError) else inference.choices[0].text


def tokens(result: Any) -> Any:
    return result.inference.usage.completion_tokens


def test_each_element_gets_what_run_inference_would_give_it_metrics_included() -> None:
    results, metrics = run(PROMPTS, LLMInference(completions(2), {'max_tokens': 3}))
    assert sorted(result.example for result in results) == sorted(PROMPTS)
    for result in results:
        assert isinstance(result, PredictionResult)
        assert tokens(result) == 3
        assert result.model_id == MODEL
    assert metrics['num_inferences'] == len(PROMPTS)
    assert metrics['completion_tokens'] == 3 * len(PROMPTS)
    assert metrics['request_latency_ms'].count == len(PROMPTS)
    assert metrics['request_queue_time_ms'].count == len(PROMPTS)
    assert metrics['inference_wall_clock_ms'].count == len(PROMPTS)
    assert metrics['load_model_latency_milli_secs'].count == 1


def test_a_slow_element_holds_nobody_up_and_comes_last(server: FakeServer) -> None:
    elements = ['[sleep=1] slow', *(f'quick {i}' for i in range(100))]
    results, _ = run(elements, LLMInference(on_server(server, window=4)))
    assert text(results[-1]) == '[SLEEP=1] SLOW'
    assert len(results) == 101


def test_results_leave_while_the_bundle_still_runs(server: FakeServer) -> None:
    """An element deep in the bundle is only answered once an earlier result came out."""
    seen = threading.Event()
    _waiting.append(seen)
    handler = on_server(server, window=2)
    elements = ['first', *(f'{i}' for i in range(50)), 'last']
    results, _ = run(elements, LLMInference(handler), beam.Map(_signal))
    assert seen.is_set()
    assert results.index('FIRST') < results.index('LAST')


_waiting: list[threading.Event] = []


def _signal(result: PredictionResult) -> Any:
    if text(result) == 'FIRST':
        _waiting[-1].set()
    if text(result) == 'LAST':
        assert _waiting[-1].is_set()
    return text(result)


def test_the_window_is_full_and_never_more(server: FakeServer) -> None:
    server.latency_s = 0.01
    run(PROMPTS, LLMInference(on_server(server, window=8)))
    assert server.most_in_flight == 8
    assert server.connections <= 8


def test_a_result_keeps_the_timestamp_the_window_and_the_pane_of_its_element(
    server: FakeServer,
) -> None:
    handler = on_server(server)
    elements = [TimestampedValue(f'[sleep={0.05 * (i % 3)}] {i}', i) for i in range(20)]
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        found = (
            pipeline
            | beam.Create(elements)
            | beam.Map(lambda value: value)
            | beam.Map(lambda t: t)
            | beam.WindowInto(FixedWindows(10))
            | LLMInference(handler)
            | beam.Map(_where)
        )
        expected = [(f'{i}', float(i), 10.0 * (i // 10)) for i in range(20)]
        assert_that(found, equal_to(expected))


def _where(
    result: PredictionResult,
    timestamp: Any = beam.DoFn.TimestampParam,
    window: Any = beam.DoFn.WindowParam,
) -> tuple[str, float, float]:
    return str(result.example).split('] ')[1], float(timestamp), float(window.start)


def test_an_element_of_two_windows_has_a_result_in_each(server: FakeServer) -> None:
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        found = (
            pipeline
            | beam.Create([TimestampedValue('[a=b] 1', 12)])
            | beam.Map(lambda value: value)
            | beam.WindowInto(SlidingWindows(10, 5))
            | LLMInference(on_server(server))
            | beam.Map(_where)
        )
        assert_that(found, equal_to([('1', 12.0, 5.0), ('1', 12.0, 10.0)]))


def test_keys_stay_with_their_results(server: FakeServer) -> None:
    pairs = [(i % 3, f'{i}') for i in range(30)]
    results, _ = run(pairs, LLMInference(KeyedModelHandler(on_server(server))))
    assert sorted((key, r.example) for key, r in results) == sorted(pairs)
    assert all(r.example == text(r) for _, r in results)


def test_a_handler_that_may_have_keys_goes_by_each_element(server: FakeServer) -> None:
    elements: list[Any] = [('key', 'one'), 'two']
    results, _ = run(elements, LLMInference(MaybeKeyedModelHandler(on_server(server))))
    [keyed] = [r for r in results if not isinstance(r, PredictionResult)]
    assert (keyed[0], text(keyed[1])) == ('key', 'ONE')


@pytest.mark.parametrize('element', ['ab', ('key', 'prompt', 'more'), 7])
def test_a_keyed_handler_takes_pairs_alone(server: FakeServer, element: object) -> None:
    with pytest.raises(Exception, match='each must be a pair of a key'):
        run([element], LLMInference(KeyedModelHandler(on_server(server))))
    assert server.prompts == []


def test_functions_before_and_after_go_round_the_inference(server: FakeServer) -> None:
    handler: Any = (
        KeyedModelHandler(on_server(server))
        .with_preprocess_fn(lambda pair: (pair[0], f'prompt {pair[1]}'))
        .with_postprocess_fn(lambda pair: (pair[0], text(pair[1])))
    )
    results, _ = run([('a', 1), ('b', 2)], LLMInference(handler))
    assert sorted(results) == [('a', 'PROMPT 1'), ('b', 'PROMPT 2')]


def test_streaming_elements_are_answered_as_they_come(server: FakeServer) -> None:
    stream = (
        TestStream()
        .advance_watermark_to(0)
        .add_elements([TimestampedValue('a', 1), TimestampedValue('b', 2)])
        .advance_watermark_to(10)
        .add_elements([TimestampedValue('c', 12)])
        .advance_watermark_to_infinity()
    )
    options = PipelineOptions(['--runner=BundleBasedDirectRunner'])
    with beam.Pipeline(options=options) as pipeline:
        answered = (
            pipeline
            | stream
            | beam.WindowInto(FixedWindows(10))
            | LLMInference(on_server(server))
            | beam.Map(lambda r, window=beam.DoFn.WindowParam: (text(r), int(window.start)))
        )
        assert_that(answered, equal_to([('A', 0), ('B', 0), ('C', 10)]))


def test_a_failed_element_fails_the_bundle_by_name_once_all_were_tried(
    server: FakeServer,
) -> None:
    with pytest.raises(
        Exception, match=r'1 of 21 elements have no answer:\s+element 3: invalid_request'
    ):
        run([*'abc', '[status=400] bad', *'defghijklmnopqrs', 'z'], LLMInference(on_server(server)))
    assert 'z' in server.prompts


def test_a_failure_that_will_be_raised_reaches_no_transform_behind(server: FakeServer) -> None:
    with pytest.raises(Exception, match=r'1 of 21 elements have no answer'):
        run(['[status=400] bad', *map(str, range(20))], LLMInference(on_server(server)), ANSWERED)


ANSWERED = beam.Map(lambda result: result.inference.choices[0].text)


def test_a_failed_element_is_split_from_the_answers(server: FakeServer) -> None:
    collected.clear()
    handler = on_server(server, on_error='return')
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        split = (
            pipeline
            | beam.Create(['one', '[body=dynamo_too_long] two', 'three', ''])
            | LLMInference(handler)
            | SplitErrors()
        )
        answered, failed = split
        assert (answered, failed) == (split.answered, split.failed)
        _ = answered | beam.Map(lambda r: ('good', text(r))) | 'good' >> beam.Map(collect)
        _ = split.failed | beam.Map(lambda r: (r.example, text(r))) | 'bad' >> beam.Map(collect)
    assert sorted(collected) == [
        ('', ErrorKind.INVALID_REQUEST),
        ('[body=dynamo_too_long] two', ErrorKind.PROMPT_TOO_LONG),
        ('good', 'ONE'),
        ('good', 'THREE'),
    ]


def test_an_answer_that_cannot_be_counted_fails_no_neighbour(server: FakeServer) -> None:
    handler = on_server(server, on_error='return', max_retries=0)
    elements = ['one', *(f'[body={name}]' for name in ('odd_usage', 'odd_reason', 'bare'))]
    results, metrics = run(elements, RunInference(handler))
    malformed = ErrorKind.MALFORMED_RESPONSE
    assert [text(result) for result in results] == ['ONE', malformed, malformed, 'a']
    assert metrics['prompt_tokens'] == 5 + 3


def test_keyed_results_of_run_inference_are_split_too(server: FakeServer) -> None:
    handler: Any = KeyedModelHandler(on_server(server, on_error='return'))
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        answered, failed = (
            pipeline | beam.Create([(1, 'one'), (2, '')]) | RunInference(handler) | SplitErrors()
        )
        assert_that(answered | beam.Keys(), equal_to([1]), 'answered')
        assert_that(failed | 'failed keys' >> beam.Keys(), equal_to([2]), 'failed')


def test_only_prediction_results_can_be_split() -> None:
    with pytest.raises(Exception, match='SplitErrors got a str'):
        run(['text'], SplitErrors())


def test_requests_of_their_own_and_token_ids_are_elements_as_well() -> None:
    elements = [CompletionRequest('hello', {'max_tokens': 4}), [504, 2365, 11], 'hello']
    results, _ = run(elements, LLMInference(completions(), {'max_tokens': 2}))
    assert sorted(map(tokens, results)) == [2, 2, 4]


def test_transforms_with_the_same_handler_share_a_server() -> None:
    collected.clear()
    arguments = {'max_tokens': 1}
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        prompts = pipeline | beam.Create(PROMPTS[:8])
        first = prompts | 'a' >> LLMInference(completions(), arguments)
        second = prompts | 'b' >> RunInference(completions(), inference_args=arguments)
        seen = (first, second) | beam.Flatten() | beam.Map(servers_of_this_process)
        _ = seen | 'collect' >> beam.Map(collect)
    assert collected == [1] * 16


def servers_of_this_process(_: object) -> int:
    return len(_sharing._hosts)


@pytest.mark.parametrize('transform', [RunInference, LLMInference])
def test_each_handler_of_a_shared_server_keeps_its_own_limits(
    server: FakeServer, transform: Any
) -> None:
    talkative = on_server(server, on_error='return')
    discreet = OnServerHandler('model', use_dynamo=True, on_error='return', error_excerpt_chars=0)
    elements = ['[status=400] SECRET']
    [told], _ = run(elements, transform(talkative, model_identifier=server.url))
    [kept], _ = run(elements, transform(discreet, model_identifier=server.url))
    assert 'SECRET' in told.inference.message
    assert 'SECRET' not in kept.inference.message


@pytest.mark.parametrize(
    ('handler', 'mend'),
    [
        pytest.param(
            lambda: completions().with_no_batching(), 'with_no_batching', id='no batching'
        ),
        pytest.param(
            lambda: KeyedModelHandler([KeyModelMapping(['a'], completions())]),
            'partition the elements',
            id='several models',
        ),
        pytest.param(lambda: 'a model', 'not a str', id='no handler'),
    ],
)
def test_a_handler_that_cannot_work_fails_where_the_pipeline_is_made(
    handler: Any, mend: str
) -> None:
    with pytest.raises(ConfigurationError, match=mend):
        LLMInference(handler())


def test_arguments_are_checked_where_the_pipeline_is_made() -> None:
    with pytest.raises(ConfigurationError, match='echo'):
        LLMInference(completions(), {'echo': True})


def test_the_job_graph_names_the_handler_and_no_secret() -> None:
    transform = LLMInference(completions(env_vars={'HF_TOKEN': 'hf_secret'}))
    assert 'VLLMCompletionsModelHandler' in str(transform.annotations())
    assert 'secret' not in str(transform.annotations())


@pytest.mark.parametrize(('elements', 'fewest'), [(3, 3), (3000, 200)])
def test_batches_of_run_inference_fill_the_window_whether_elements_are_few_or_many(
    server: FakeServer, elements: int, fewest: int
) -> None:
    handler = on_server(server)  # its config promises one engine of 256 sequences
    _, metrics = run([f'{i}' for i in range(elements)], RunInference(handler))
    sizes = metrics['inference_request_batch_size']
    assert sizes.sum == elements
    assert sizes.max >= fewest
    assert sizes.count <= 1 + elements / 256
