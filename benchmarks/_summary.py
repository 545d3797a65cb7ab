"""From the runs of a comparison to its report as data: what ``report.json`` holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import _verdict
from benchmarks._reuse_ceiling import Reuse
from benchmarks._run_figures import RunFigures
from benchmarks._statistics import Estimate, mean, ratio
from benchmarks._verdict import Verdict, speeds_of

Report = dict[str, Any]

PERCENTILES = (50, 90, 99)
BASELINE = 'dynamo-rr'
_SECONDS_PER_HOUR = 3600
_MILLION = 1_000_000

NOT_ON_GPUS = {
    'simulated': (
        'Measured on simulated engines: scheduler, prefix cache, KV events and router are real, '
        'the time that computing takes is a model, and what they answer is noise, so hardly any of '
        'it parses. Nothing here was measured on GPUs.'
    ),
    'cpu': (
        'Measured on real vLLM engines on CPU cores with a small model. Nothing here was measured '
        'on GPUs.'
    ),
}


@dataclasses.dataclass(frozen=True)
class Cohort:
    """The prompts of one cohort.

    Attributes:
      name: Its name.
      path: Where they lie.
      reuse: What they share.
      manifest: What they were made from; ``None`` for the user's own.
    """

    name: str
    path: str
    reuse: Reuse
    manifest: Mapping[str, Any] | None = None


def summarize(
    cohorts: Sequence[Cohort],
    runs: Sequence[RunFigures],
    *,
    arms: Mapping[str, str],
    stand_ins: Mapping[str, str],
    facts: Report,
) -> Report:
    """The report.

    Args:
      cohorts: The prompts, in the order of the report.
      runs: All runs, in the order in which they were made.
      arms: What each arm is, the one with the fewest moving parts first.
      stand_ins: What must be said of arms that are not what their names say.
      facts: What else the report holds: ``engine``, ``settings``, ``price_per_hour`` and more.
    """
    by_cohort = {
        cohort.name: {
            arm: [run for run in runs if (run.cohort, run.arm) == (cohort.name, arm)]
            for arm in arms
        }
        for cohort in cohorts
    }
    verdicts = {name: _verdict.judge(found, stand_ins) for name, found in by_cohort.items()}
    baseline = BASELINE if BASELINE in arms else next(iter(arms))
    return {
        'verdict': _verdict.overall(verdicts),
        'notes': [*filter(None, [NOT_ON_GPUS.get(facts['engine'])]), *stand_ins.values()],
        'arms': dict(arms),
        'stand_ins': sorted(stand_ins),
        'baseline': baseline,
        **facts,
        'cohorts': [
            _cohort(cohort, by_cohort[cohort.name], verdicts[cohort.name], baseline, facts)
            for cohort in cohorts
        ],
    }


def _cohort(
    cohort: Cohort,
    runs: Mapping[str, Sequence[RunFigures]],
    verdict: Verdict,
    baseline: str,
    facts: Report,
) -> Report:
    cache = facts['settings']['kv_cache_tokens']
    return {
        'cohort': cohort.name,
        'verdict': dataclasses.asdict(verdict),
        'records': cohort.reuse.records,
        'prompt_tokens': cohort.reuse.prompt_tokens,
        'cached_share_ceiling': cohort.reuse.ceiling,
        'working_set_tokens': cohort.reuse.working_set_tokens,
        'working_set_in_caches': cohort.reuse.working_set_tokens / cache if cache else None,
        'data': cohort.manifest,
        'arms': {
            arm: _arm(found, runs[baseline], facts['price_per_hour']) for arm, found in runs.items()
        },
    }


def _arm(
    runs: Sequence[RunFigures], baseline: Sequence[RunFigures], price_per_hour: float | None
) -> Report:
    speed = _mean(run.records_per_s for run in runs)
    tokens = _mean(run.output_tokens_per_s for run in runs)
    own, others = speeds_of(runs), speeds_of(baseline)
    return {
        'records_per_s': _plain(speed),
        'output_tokens_per_s': _plain(tokens),
        'over_baseline': _plain(ratio(own, others) if own and others else None),
        'cached_share': _plain(_mean(run.cached_share for run in runs)),
        'latency_ms': _percentiles(runs, lambda run: run.latency_ms or None),
        'ttft_ms': _percentiles(runs, lambda run: run.ttft_ms),
        'engine_shares': _engine_shares(runs),
        'parsed_share': _plain(_mean(run.parsed_share for run in runs)),
        'records': sum(run.records for run in runs),
        'failed': sum(run.failed for run in runs),
        'errors': {
            kind: sum(run.errors.get(kind, 0) for run in runs)
            for kind in sorted({kind for run in runs for kind in run.errors})
        },
        'retried': sum(run.retried for run in runs),
        'restarts': sum(run.restarts for run in runs),
        'cost': {
            'per_million_prompts': _plain(_cost(speed, price_per_hour)),
            'per_million_output_tokens': _plain(_cost(tokens, price_per_hour)),
        },
        'runs': [dataclasses.asdict(run) for run in runs],
    }


def _mean(values: Iterable[float | None]) -> Estimate | None:
    """``None`` where a run has no value, for the mean of the others would be of something else."""
    found = list(values)
    known = [value for value in found if value is not None]
    return mean(known) if known and len(known) == len(found) else None


def _percentiles(
    runs: Sequence[RunFigures], quantiles: Callable[[RunFigures], Sequence[float] | None]
) -> Report | None:
    found = [quantiles(run) for run in runs]
    known = [values for values in found if values is not None]
    if not known or len(known) < len(found):
        return None
    return {f'p{p}': _plain(mean([values[p] for values in known])) for p in PERCENTILES}


def _engine_shares(runs: Sequence[RunFigures]) -> list[float] | None:
    """The mean share of the busiest engine of each run, of the second, and so on."""
    known = [run.engine_shares for run in runs if run.engine_shares is not None]
    if not known or len(known) < len(runs):
        return None
    # An engine that was replaced came back under another name.
    return [mean(shares).mean for shares in itertools.zip_longest(*known, fillvalue=0.0)]


def _cost(rate: Estimate | None, price_per_hour: float | None) -> Estimate | None:
    """What a million cost where so many are done in a second."""
    if rate is None or price_per_hour is None or not rate.mean:
        return None
    if rate.low is not None and rate.low <= 0:
        rate = Estimate(rate.mean, None, None, rate.repeats)
    return rate.map(lambda per_s: price_per_hour / (per_s * _SECONDS_PER_HOUR) * _MILLION)


def _plain(estimate: Estimate | None) -> Report | None:
    return None if estimate is None else dataclasses.asdict(estimate)
