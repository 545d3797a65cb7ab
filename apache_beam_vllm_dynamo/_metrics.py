"""What becomes a Beam metric.

Beam drops, without an error, what is recorded off the bundle's own thread; so outcomes are
gathered elsewhere and recorded here in one go, by the thread that called ``run_inference``.
"""

from __future__ import annotations

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
        self._prompt_tokens = Metrics.counter(NAMESPACE, 'prompt_tokens')
        self._cached_tokens = Metrics.counter(NAMESPACE, 'cached_prompt_tokens')
        self._completion_tokens = Metrics.counter(NAMESPACE, 'completion_tokens')
        self._retries = Metrics.counter(NAMESPACE, 'retried_requests')
        self._restarts = Metrics.counter(NAMESPACE, 'engine_restarts')
        self._migrations = Metrics.counter(NAMESPACE, 'migrated_requests')
        self._latency = Metrics.distribution(NAMESPACE, 'request_latency_ms')
        self._queue_time = Metrics.distribution(NAMESPACE, 'request_queue_time_ms')
        self._wall_clock = Metrics.distribution(NAMESPACE, 'inference_wall_clock_ms')
        # RunInference's own, by its names, for the transform that does without it.
        self._number = Metrics.counter(NAMESPACE, 'num_inferences')
        self._load = Metrics.distribution(NAMESPACE, 'load_model_latency_milli_secs')

    def record(self, outcomes: Iterable[Outcome]) -> None:
        """Records the outcomes of one batch; to be called on the bundle's thread."""
        for outcome in outcomes:
            if outcome.retried:
                self._retries.inc(len(outcome.retried))
            if isinstance(outcome, Answer):
                self._record_response(outcome.response)
                self._latency.update(round(outcome.latency_s * 1000))
                self._queue_time.update(round(outcome.queue_s * 1000))
                self._wall_clock.update(outcome.completed_at_ms)
            else:
                Metrics.counter(NAMESPACE, f'failed_{outcome.error.kind}').inc()

    def record_restarts(self, restarts: int) -> None:
        """Records restarts of children; to be called on the bundle's thread."""
        if restarts:
            self._restarts.inc(restarts)

    def record_migrations(self, migrations: int) -> None:
        """Records requests that moved to another engine; to be called on the bundle's thread."""
        if migrations:
            self._migrations.inc(migrations)

    def record_number(self, inferences: int) -> None:
        """Counts inferences under the name that RunInference uses."""
        self._number.inc(inferences)

    def record_load(self, took_ms: int) -> None:
        """Records the start of a server under the name that RunInference uses."""
        self._load.update(took_ms)

    def _record_response(self, response: Response) -> None:
        for choice in response.choices:
            Metrics.counter(NAMESPACE, f'finish_reason_{_reason(choice.finish_reason)}').inc()
        usage = response.usage
        if usage is None:
            return
        self._prompt_tokens.inc(usage.prompt_tokens or 0)
        self._completion_tokens.inc(usage.completion_tokens or 0)
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens:
            self._cached_tokens.inc(details.cached_tokens)


def _reason(said: str | None) -> str:
    # A server may leave the reason out, or have one of its own.
    return said or 'unknown'
