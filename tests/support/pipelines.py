"""Beam pipelines run in the test's own process, and what came out of them."""

from __future__ import annotations

from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo._metrics import NAMESPACE

IN_PROCESS = PipelineOptions(['--runner=FnApiRunner'])

collected: list[Any] = []


def collect(element: object) -> None:
    """In a module with a name of its own, so that a runner in this process fills this very list."""
    collected.append(element)


def our_metrics(result: Any) -> dict[str, Any]:
    """The committed counters and distributions of ours, by name."""
    metrics = result.metrics().query()
    return {
        m.key.metric.name: m.committed
        for m in (*metrics['counters'], *metrics['distributions'])
        if m.key.metric.namespace == NAMESPACE
    }
