"""Runs of a comparison that were never made, for tests of what becomes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks._arms import ARMS, Settings, stand_in
from benchmarks._reuse_ceiling import Reuse
from benchmarks._run_figures import RunFigures
from benchmarks._summary import Cohort, summarize

SETTINGS = Settings(
    engine='simulated', model='m', num_gpus=4, max_tokens=16, kv_cache_tokens=80_000
)
FACTS: dict[str, Any] = {
    'engine': 'simulated',
    'repeats': 3,
    'price_per_hour': 3.6,
    'command': 'python -m benchmarks.compare --out somewhere',
    'date': '2026-01-01T00:00:00+00:00',
    'took_s': 90.0,
    'settings': dataclasses.asdict(SETTINGS),
    'versions': {'python': '3.11'},
    'machine': {'cores': 2},
}


def run(arm: str, cohort: str, repeat: int, speed: float | None, **fields: Any) -> RunFigures:
    """A run with figures that go with its speed."""
    rate = speed or 0.0
    given: dict[str, Any] = {
        'records': 100,
        'failed': 0,
        'errors': {},
        'output_tokens_per_s': speed and speed * 16,
        'window_s': 100 / rate if rate else 0.0,
        'cached_share': 0.5,
        'latency_ms': tuple(10.0 * q / (rate or 1) for q in range(101)),
        'ttft_ms': None if arm == 'native-dp' else tuple(float(q) for q in range(101)),
        'engine_shares': None if arm == 'native-dp' else (0.4, 0.3, 0.2, 0.1),
        'parsed_share': 0.25,
        'retried': 0,
        'restarts': 0,
        **fields,
    }
    return RunFigures(arm, cohort, repeat, records_per_s=speed, **given)


def runs(arm: str, cohort: str, speeds: list[float], **fields: Any) -> list[RunFigures]:
    """A run for each speed."""
    return [run(arm, cohort, i, speed, **fields) for i, speed in enumerate(speeds, 1)]


def cohort(name: str, ceiling: float = 0.8) -> Cohort:
    """The prompts of a cohort."""
    return Cohort(
        name,
        f'{name}.jsonl',
        Reuse(100, 100_000, round(ceiling * 100_000), 120_000),
        {'sha256': 'a' * 64, 'bytes': 1000, 'tokens_counted_by': 'an estimate'},
    )


def report(found: list[RunFigures], **facts: Any) -> dict[str, Any]:
    """The report of some runs."""
    names = [name for name in ARMS if any(r.arm == name for r in found)]
    return summarize(
        [cohort(name) for name in dict.fromkeys(r.cohort for r in found)],
        found,
        arms={name: ARMS[name].meaning for name in names},
        stand_ins={n: note for n in names if (note := stand_in(ARMS[n], SETTINGS))},
        facts={**FACTS, **facts},
    )
