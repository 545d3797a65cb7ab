"""The handlers in real Beam pipelines, on simulated engines behind etcd, frontend and router."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference import vllm_inference as upstream
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    KeyModelMapping,
    PredictionResult,
    RunInference,
)
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.testing.util import assert_that, equal_to
from openai.types import Completion
from openai.types.chat import ChatCompletion

from apache_beam_vllm_dynamo import (
    ChatRequest,
    CompletionRequest,
    ErrorKind,
    InferenceError,
    OpenAIChatMessage,
    VLLMChatModelHandler,
    VLLMCompletionsModelHandler,
)
from tests.support.pipelines import IN_PROCESS, collect, collected, our_metrics
from tests.support.stacks import MODEL, pids_of_children, simulated

pytestmark = pytest.mark.usefixtures('nothing_left')

PROMPTS = [f'prompt number {i}' for i in range(40)]


def completions(engines: int = 2, **arguments: Any) -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler(
        MODEL, use_dynamo=True, dynamo_runtime_config=simulated(engines), **arguments
    )


def chat(**arguments: Any) -> VLLMChatModelHandler:
    return VLLMChatModelHandler(
        MODEL, use_dynamo=True, dynamo_runtime_config=simulated(1), **arguments
    )


def run(
    elements: Sequence[object], transform: beam.PTransform[Any, Any], options: Any = IN_PROCESS
) -> tuple[list[Any], dict[str, Any]]:
    """Runs a pipeline in this process; what came out, and the committed metrics of ours."""
    collected.clear()
    with beam.Pipeline(options=options) as pipeline:
        _ = pipeline | beam.Create(elements) | transform | beam.Map(collect)
    return list(collected), our_metrics(pipeline.result)


def test_completions_are_what_beams_own_handler_returns() -> None:
    results, metrics = run(PROMPTS, RunInference(completions(), inference_args={'max_tokens': 3}))
    assert sorted(result.example for result in results) == sorted(PROMPTS)
    for result in results:
        assert isinstance(result, PredictionResult)
        assert isinstance(result.inference, Completion)
        assert result.inference.choices[0].finish_reason == 'length'
        assert result.model_id == MODEL
    assert metrics['num_inferences'] == len(PROMPTS)
    assert metrics['completion_tokens'] == 3 * len(PROMPTS)
    assert metrics['prompt_tokens'] == sum(r.inference.usage.prompt_tokens for r in results)
    clock = metrics['inference_wall_clock_ms']
    assert clock.count == len(PROMPTS)
    assert 0 <= clock.max - clock.min < 60_000


def test_a_prompt_without_max_tokens_ends_after_the_documented_default() -> None:
    [result], _ = run(['hello'], RunInference(completions(1)))
    assert result.inference.usage.completion_tokens == 16


def test_chat_takes_beams_messages_and_ours_and_plain_dicts() -> None:
    conversations: list[Any] = [
        [upstream.OpenAIChatMessage('user', 'hello')],
        [OpenAIChatMessage('system', 'be brief'), OpenAIChatMessage('user', 'hello')],
        [{'role': 'user', 'content': 'hello'}],
        ChatRequest([{'role': 'user', 'content': 'hello'}], {'max_tokens': 5}),
    ]
    results, _ = run(conversations, RunInference(chat(), inference_args={'max_tokens': 2}))
    assert len(results) == 4
    tokens = []
    for result in results:
        assert isinstance(result.inference, ChatCompletion)
        assert result.inference.choices[0].message.role == 'assistant'
        assert result.inference.usage is not None
        tokens.append(result.inference.usage.completion_tokens)
    assert sorted(tokens) == [2, 2, 2, 5]


def test_dynamo_alone_is_one_engine_in_turn_without_events() -> None:
    handler = VLLMCompletionsModelHandler(MODEL, use_dynamo=True)
    assert repr(handler).endswith('Dynamo, 1 engine, round-robin)')
    handler = VLLMCompletionsModelHandler(
        MODEL, use_dynamo=True, dynamo_frontend_kwargs={'router-mode': 'kv'}
    )
    assert repr(handler).endswith('Dynamo, 1 engine, kv)')


def test_an_element_may_carry_its_own_arguments_or_be_token_ids() -> None:
    elements = [CompletionRequest('hello', {'max_tokens': 4}), [504, 2365, 11], 'hello']
    results, _ = run(elements, RunInference(completions(1), inference_args={'max_tokens': 2}))
    tokens = {str(r.example): r.inference.usage.completion_tokens for r in results}
    assert sorted(tokens.values()) == [2, 2, 4]
    assert tokens[str(elements[0])] == 4


def test_one_bad_prompt_touches_nobody_and_comes_back_as_a_record() -> None:
    elements = ['one', '', 'three', [1, 'two'], 'five']
    results, metrics = run(elements, RunInference(completions(on_error='return')))
    failed = [r for r in results if isinstance(r.inference, InferenceError)]
    assert sorted(str(r.example) for r in failed) == ['', "[1, 'two']"]
    assert {r.inference.kind for r in failed} == {ErrorKind.INVALID_REQUEST}
    assert metrics['failed_invalid_request'] == 2
    assert sum(isinstance(r.inference, Completion) for r in results) == 3


def test_a_failed_element_fails_its_batch_by_name_once_all_were_tried() -> None:
    with pytest.raises(
        Exception, match=r'1 of 3 elements have no answer:\s+element 1: invalid_request'
    ):
        run(['one', '', 'three'], RunInference(completions(1)))


def test_failures_of_a_batch_go_to_the_dead_letter_output() -> None:
    collected.clear()
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        good, bad = (
            pipeline
            | beam.Create(['one', '', 'three'])
            | RunInference(completions(1, max_batch_size=1)).with_exception_handling()
        )
        _ = good | beam.Map(lambda r: ('good', r.example)) | 'good' >> beam.Map(collect)
        _ = bad.failed_inferences | beam.Map(lambda e: ('bad', e[0])) | 'bad' >> beam.Map(collect)
    assert sorted(collected) == [('bad', ['']), ('good', 'one'), ('good', 'three')]


def test_keys_and_pre_and_post_processing_go_round_the_handler() -> None:
    handler: Any = (
        KeyedModelHandler(completions(1))
        .with_preprocess_fn(lambda pair: (pair[0], f'prompt {pair[1]}'))
        .with_postprocess_fn(lambda pair: (pair[0], pair[1].example, pair[1].model_id))
    )
    results, _ = run([('a', 1), ('b', 2)], RunInference(handler))
    assert sorted(results) == [('a', 'prompt 1', MODEL), ('b', 'prompt 2', MODEL)]


def test_several_models_live_side_by_side_each_with_its_own_stack() -> None:
    handler = KeyedModelHandler(
        [
            KeyModelMapping(['short'], completions(1, env_vars={'KIND': 'short'})),
            KeyModelMapping(['long'], completions(1, env_vars={'KIND': 'long'})),
        ]
    )
    pairs = [('short', 'a'), ('long', 'b'), ('short', 'c'), ('long', 'd')]
    arguments = {'max_tokens': 1, 'extra_body': {'nvext': {'extra_fields': ['worker_id']}}}
    results, _ = run(pairs, RunInference(handler, inference_args=arguments))
    assert sorted((key, result.example) for key, result in results) == sorted(pairs)
    engines = {(key, str(result.inference.nvext['worker_id'])) for key, result in results}
    assert len(engines) == 2
    assert len({engine for _, engine in engines}) == 2


def test_functions_before_and_after_go_round_a_handler_without_keys() -> None:
    handler: Any = (
        completions(1).with_preprocess_fn('prompt {}'.format).with_postprocess_fn(text_of)
    )
    assert run([1, 2], RunInference(handler))[0] == ['prompt 1', 'prompt 2']


def text_of(result: PredictionResult) -> str:
    return str(result.example)


def test_batches_may_be_made_before_the_handler() -> None:
    handler = completions(1).with_no_batching()
    results, metrics = run([['a', 'b'], ['c']], RunInference(handler))
    assert sorted(r.example for r in results) == ['a', 'b', 'c']
    assert metrics['inference_request_batch_size'].max == 2


def test_streaming_elements_are_answered_as_they_come() -> None:
    stream = (
        TestStream()
        .add_elements(['a', 'b'])
        .advance_processing_time(10)
        .add_elements(['c'])
        .advance_watermark_to_infinity()
    )
    handler = completions(1, max_batch_duration_secs=1)
    options = PipelineOptions(['--runner=BundleBasedDirectRunner'])
    with beam.Pipeline(options=options) as pipeline:
        answered = (
            pipeline
            | stream
            | RunInference(handler, inference_args={'max_tokens': 1})
            | beam.Map(lambda result: (result.example, result.inference.usage.completion_tokens))
        )
        assert_that(answered, equal_to([('a', 1), ('b', 1), ('c', 1)]))


def test_batches_fill_the_engines_from_the_first_one_on() -> None:
    _, metrics = run(PROMPTS, RunInference(completions()))
    assert metrics['inference_request_batch_size'].max == len(PROMPTS)
    sizes = completions(2).batch_elements_kwargs()
    assert (sizes['min_batch_size'], sizes['max_batch_size']) == (512, 2048)
    assert completions(2, max_batch_size=8).batch_elements_kwargs()['min_batch_size'] == 8


def test_sdk_processes_of_a_machine_share_one_server() -> None:
    options = PipelineOptions(
        ['--runner=FnApiRunner', '--direct_running_mode=multi_processing', '--direct_num_workers=2']
    )
    inference_args = {'max_tokens': 1, 'extra_body': {'nvext': {'extra_fields': ['worker_id']}}}
    with beam.Pipeline(options=options) as pipeline:
        answers = (
            pipeline
            | beam.Create(PROMPTS)
            | beam.Reshuffle()
            | RunInference(completions(1, max_batch_size=4), inference_args=inference_args)
            | beam.Map(lambda result: json.dumps(result.inference.nvext['worker_id']))
        )
        count = answers | beam.combiners.Count.Globally()
        engines = answers | beam.Distinct() | 'engines' >> beam.combiners.Count.Globally()
        assert_that(count, equal_to([len(PROMPTS)]), label='every prompt')
        assert_that(engines, equal_to([1]), label='one engine')
    assert pids_of_children() == set()


def test_a_handler_travels_with_the_pipeline_and_names_no_secret() -> None:
    handler = completions(1, env_vars={'HF_TOKEN': 'hf_secret'})
    assert repr(pickle.loads(pickle.dumps(handler))) == repr(handler)
    assert 'secret' not in repr(handler) + str(RunInference(handler).annotations())


def test_prompts_and_answers_stay_out_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(['a very private prompt'], RunInference(completions(1)))
    assert 'private' not in caplog.text
