"""What becomes a Beam metric.

Beam drops, without an error, what is recorded off the bundle's own thread; so outcomes are
gathered elsewhere and recorded here in one go, by the thread that called ``run_inference``.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping, Sequence

from apache_beam.metrics import Metrics

from apache_beam_vllm_dynamo._prefix_census import NEW_BELOW, PIECE_BYTES, census
from apache_beam_vllm_dynamo._requests import PreparedRequest
from apache_beam_vllm_dynamo._responses import Answer, Outcome, Response
from apache_beam_vllm_dynamo._runtime import ENGINE_REQUESTS
from apache_beam_vllm_dynamo.errors import InferenceError

_LOGGER = logging.getLogger(__name__)

NAMESPACE = 'BeamML_vLLM_Dynamo'


class InferenceMetrics:
    """The metrics of one handler in one process; all names end in their unit where they have one.

    ``inference_wall_clock_ms`` holds the time at which each inference completed, in
    milliseconds since 1970: its count divided by its range is the throughput without the
    time that provisioning and model load took.
    """

    def __init__(self) -> None:
        self._counters: dict[str, Metrics.DelegatingCounter] = {}
        self._bundle: collections.Counter[str] = collections.Counter()
        self._latency = Metrics.distribution(NAMESPACE, 'request_latency_ms')
        self._queue_time = Metrics.distribution(NAMESPACE, 'request_queue_time_ms')
        self._wall_clock = Metrics.distribution(NAMESPACE, 'inference_wall_clock_ms')
        # RunInference's own, by its names, for the transform that does without it.
        self._load = Metrics.distribution(NAMESPACE, 'load_model_latency_milli_secs')

    def record(
        self,
        requests: Sequence[PreparedRequest | InferenceError],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Records requests and their outcomes; to be called on the bundle's thread."""
        # A counter costs some microseconds to find and to add to, so it gets sums.
        sums: collections.Counter[str] = collections.Counter()
        for request, outcome in zip(requests, outcomes, strict=True):
            sums['retried_requests'] += len(outcome.retried)
            if isinstance(outcome, Answer):
                _add_response(sums, outcome.response)
                if isinstance(request, PreparedRequest):
                    _add_prefix(sums, request, outcome.response)
                self._latency.update(round(outcome.latency_s * 1000))
                self._queue_time.update(round(outcome.queue_s * 1000))
                self._wall_clock.update(outcome.completed_at_ms)
            else:
                sums[f'failed_{outcome.error.kind}'] += 1
        self.count(sums)

    def _count(self, name: str, number: int) -> None:
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Metrics.counter(NAMESPACE, name)
        counter.inc(number)

    def count(self, events: Mapping[str, int]) -> None:
        """Counts by name; to be called on the bundle's thread."""
        self._bundle.update(events)
        for name, number in events.items():
            if number:
                self._count(name, number)

    def end_bundle(self) -> None:
        """Says what came of the prefixes since this was called last."""
        if self._bundle['prompt_tokens'] and _LOGGER.isEnabledFor(logging.DEBUG):
            _LOGGER.debug(reuse_text(self._bundle))
        self._bundle.clear()

    def record_number(self, inferences: int) -> None:
        """Counts inferences under the name that RunInference uses."""
        self._count('num_inferences', inferences)

    def record_load(self, took_ms: int) -> None:
        """Records the start of a server under the name that RunInference uses."""
        self._load.update(took_ms)


def reuse_text(counts: Mapping[str, int]) -> str:
    """What came of the prefixes, in a line, by the counters of a bundle."""
    tokens = counts['prompt_tokens']
    engines = sorted(
        (int(name.removeprefix(ENGINE_REQUESTS)), number)
        for name, number in counts.items()
        if name.startswith(ENGINE_REQUESTS)
    )
    shares = ', '.join(f'{number} by engine {engine}' for engine, number in engines)
    return (
        f'{tokens} prompt tokens, of which {counts.get("cached_prompt_tokens", 0) / tokens:.1%} '
        f'were cached and {counts.get("cacheable_prompt_tokens", 0) / tokens:.1%} could be; '
        f'{counts.get("distinct_prefixes", 0)} new prefixes; requests since last counted: '
        f'{shares or "not known"}'
    )


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


def _add_prefix(
    sums: collections.Counter[str], request: PreparedRequest, response: Response
) -> None:
    seen = census().seen_share(request.body[: request.prompt_bytes])
    if request.prompt_bytes >= PIECE_BYTES:
        sums['distinct_prefixes'] += seen < NEW_BELOW
    if response.usage is not None:
        sums['cacheable_prompt_tokens'] += round(seen * (response.usage.prompt_tokens or 0))


def _reason(said: str | None) -> str:
    # A server may leave the reason out, or have one of its own.
    return said or 'unknown'
