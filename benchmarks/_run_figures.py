"""What one run of one arm gave, from its manifest and its lines of output."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

QUANTILES = tuple(range(101))  # per cent


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """One run.

    Attributes:
      arm: The name of the arm.
      cohort: The name of the cohort.
      repeat: Which repeat, counted from 1.
      records: How many prompts were asked.
      failed: How many of them have no answer.
      errors: How often each kind of error is the reason.
      records_per_s: Prompts answered a second, without the start of the servers; ``None``
        where less than two were.
      output_tokens_per_s: Tokens generated a second.
      window_s: From the first answer to the last.
      cached_share: The share of the prompts' tokens that came from a cache.
      latency_ms: At each of :data:`QUANTILES`, what a request took as the client saw it.
      ttft_ms: The same, until the first token, as the frontend saw it; ``None`` where
        nothing says.
      engine_shares: The share of each engine in the prompts answered, largest first; ``None``
        where nothing says.
      parsed_share: The share of the answers that parse; ``None`` where any text would do.
      retried: How often a request was sent again.
      restarts: How many processes were replaced.
    """

    arm: str
    cohort: str
    repeat: int
    records: int
    failed: int
    errors: Mapping[str, int]
    records_per_s: float | None
    output_tokens_per_s: float | None
    window_s: float
    cached_share: float
    latency_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...] | None
    engine_shares: tuple[float, ...] | None
    parsed_share: float | None
    retried: int
    restarts: int


class LostRecordsError(Exception):
    """A run has not one line of output for each prompt; none of its figures can be used."""


def figures_of(
    manifest: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    cohort: str,
    repeat: int,
    engines: int | None,
) -> RunFigures:
    """The figures of a run.

    Args:
      manifest: What the run wrote beside its output.
      rows: The lines of its output.
      cohort: Which prompts they are of.
      repeat: Which repeat it was.
      engines: How many engines answered under names of their own, the idle ones too; ``None``
        where they had none.

    Raises:
      LostRecordsError: Prompts and lines of output are not equally many, or the metrics have
        not as many answers as the output.
    """
    records, metrics = manifest['input']['records'], manifest['metrics']
    answered = [row for row in rows if row['error'] is None]
    if len(rows) != records or len(answered) != manifest['answered']:
        raise LostRecordsError(
            f'{manifest["arm"]}, cohort {cohort}: {records} prompts, {len(rows)} lines of output, '
            f'{len(answered)} of them answers, and {manifest["answered"]} answers counted; each '
            'prompt must have one line, and each answer be counted once.'
        )
    prompt_tokens = metrics.get('prompt_tokens', 0)
    parsed = [row['parses'] for row in answered if row['parses'] is not None]
    return RunFigures(
        arm=manifest['arm'],
        cohort=cohort,
        repeat=repeat,
        records=records,
        failed=records - len(answered),
        errors={
            name.removeprefix('failed_'): number
            for name, number in metrics.items()
            if name.startswith('failed_')
        },
        records_per_s=manifest['records_per_s'],
        output_tokens_per_s=manifest['output_tokens_per_s'],
        window_s=manifest['window_s'],
        cached_share=metrics.get('cached_prompt_tokens', 0) / prompt_tokens
        if prompt_tokens
        else 0.0,
        latency_ms=_quantiles([row['latency_ms'] for row in answered]) or (),
        ttft_ms=_quantiles([row['ttft_ms'] for row in answered if row['ttft_ms'] is not None]),
        engine_shares=_shares([row['engine'] for row in answered], engines),
        parsed_share=sum(parsed) / len(parsed) if parsed else None,
        retried=metrics.get('retried_requests', 0),
        restarts=metrics.get('engine_restarts', 0),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, ...] | None:
    if not values:
        return None
    return tuple(round(float(found), 3) for found in np.percentile(values, QUANTILES))


def _shares(engines: Sequence[str | None], number: int | None) -> tuple[float, ...] | None:
    named = collections.Counter(engine for engine in engines if engine is not None)
    if not named or number is None:
        return None
    shares = sorted((n / named.total() for n in named.values()), reverse=True)
    return tuple(shares + [0.0] * (number - len(shares)))
