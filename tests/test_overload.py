"""Overload slows a job and fails nothing: on simulated engines that refuse what is too much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import RunInference

from apache_beam_vllm_dynamo import (
    InferenceError,
    LLMInference,
    VLLMCompletionsModelHandler,
)
from apache_beam_vllm_dynamo._metrics import NAMESPACE
from tests.support.pipelines import IN_PROCESS, collect, collected
from tests.support.stacks import MODEL, simulated

pytestmark = pytest.mark.usefixtures('nothing_left')


# A burst of siblings, which the KV router sends to the engine that has their beginning.
SIBLINGS = [' '.join(['one long instruction for all'] * 100) + f' and part {i}' for i in range(96)]


def overloaded(**arguments: Any) -> VLLMCompletionsModelHandler:
    """Two engines, each of which counts as busy as soon as it has a prompt to read."""
    config = simulated(
        2,
        simulation_kwargs={'speedup-ratio': 5},
        frontend_kwargs={'active-prefill-tokens-threshold': 1},
    )
    return VLLMCompletionsModelHandler(
        MODEL, use_dynamo=True, dynamo_runtime_config=config, on_error='return', **arguments
    )


@pytest.mark.parametrize('transform', [RunInference, LLMInference])
def test_a_burst_that_the_engines_refuse_is_answered_whole(
    transform: Callable[..., Any],
) -> None:
    collected.clear()
    handler = overloaded()
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        _ = (
            pipeline
            | beam.Create(SIBLINGS)
            | transform(handler, inference_args={'max_tokens': 4})
            | beam.Map(collect)
        )
    metrics = pipeline.result.metrics().query(
        beam.metrics.MetricsFilter().with_namespace(NAMESPACE)
    )
    counters = {m.key.metric.name: m.committed for m in metrics['counters']}
    assert sorted(result.example for result in collected) == sorted(SIBLINGS)
    assert not any(isinstance(result.inference, InferenceError) for result in collected)
    assert counters['retried_requests'] > 0, 'nothing was refused, so nothing was shown'
    assert not [name for name in counters if name.startswith('failed_')]


def test_an_element_that_waited_too_long_says_that_the_server_was_overloaded() -> None:
    collected.clear()
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        _ = (
            pipeline
            | beam.Create(SIBLINGS)
            | LLMInference(overloaded(max_wait_secs=0), {'max_tokens': 4})
            | beam.Map(collect)
        )
    kinds = {r.inference.kind for r in collected if isinstance(r.inference, InferenceError)}
    assert len(collected) == len(SIBLINGS)
    assert kinds == {'overloaded'}
