"""What becomes a Beam metric.

Beam drops, without an error, what is recorded off the bundle's own thread; so outcomes are
gathered elsewhere and recorded here in one go, by the thread that called ``run_inference``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from apache_beam.metrics import Metrics

from apache_beam_vllm_dynamo._responses import Answer, Outcome, Response

NAMESPACE = 'BeamML_vLLM_Dynamo'


class InferenceMetrics:
    """The metrics of one handler in one process; all names end in their unit where they have one.

    ``inference_wall_clock_ms`` holds the time at which each inference completed, in
    milliseconds since 1970: its count divided by its range is the throughput without the
    time that provisioning and model load took.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Metrics.DelegatingCounter] = {}
        self._latency = Metrics.distribution(NAMESPACE, 'request_latency_ms')
        self._queue_time = Metrics.distribution(NAMESPACE, 'request_queue_time_ms')
        self._wall_clock = Metrics.distribution(NAMESPACE, 'inference_wall_clock_ms')
        # RunInference's own, by its names, for the transform that does without it.
        self._load = Metrics.distribution(NAMESPACE, 'load_model_latency_milli_secs')

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """Records the outcomes of one batch; to be called on the bundle's thread."""
        # A counter costs some microseconds to find and to add to, so it gets sums.
        sums: collections.Counter[str] = collections.Counter()
        for outcome in outcomes:
            sums['retried_requests'] += len(outcome.retried)
            if isinstance(outcome, Answer):
                _add_response(sums, outcome.response)
                self._latency.update(round(outcome.latency_s * 1000))
                self._queue_time.update(round(outcome.queue_s * 1000))
                self._wall_clock.update(outcome.completed_at_ms)
            else:
                sums[f'failed_{outcome.error.kind}'] += 1
        for name, number in sums.items():
            if number:
                self._count(name, number)

    def _count(self, name: str, number: int) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Metrics.counter(NAMESPACE, name)
        counter.inc(number)

    def record_restarts(self, restarts: int) -> None:
        """Records restarts of children; to be called on the bundle's thread."""
        if restarts:
            self._count('engine_restarts', restarts)

    def record_migrations(self, migrations: int) -> None:
        """Records requests that moved to another engine; to be called on the bundle's thread."""
        if migrations:
            self._count('migrated_requests', migrations)

    def record_number(self, inferences: int) -> None:
        """Counts inferences under the name that RunInference uses."""
        self._count('num_inferences', inferences)

    def record_load(self, took_ms: int) -> None:
        """Records the start of a server under the name that RunInference uses."""
        self._load.update(took_ms)


def _add_response(sums: collections.Counter[str], response: Response) -> None:
    for choice in response.choices:
        sums[f'finish_reason_{_reason(choice.finish_reason)}'] += 1
    usage = response.usage
    if usage is None:
        return
    sums['prompt_tokens'] += usage.prompt_tokens or 0
    sums['completion_tokens'] += usage.completion_tokens or 0
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens:
        sums['cached_prompt_tokens'] += details.cached_tokens


def _reason(said: str | None) -> str:
    # A server may leave the reason out, or have one of its own.
    return said or 'unknown'
