"""What a driver costs: our handler, our transform and Beam's own handler beside bare aiohttp.

All of them put the same prompts to the same simulated engines, in turn, in one run::

    python -m benchmarks.driver_overhead --json driver_overhead.json --repeats 3

``instant``: engines that answer in a millisecond, so that all that is measured is the client,
Beam's runner and the frontend. At batch size B the limit gathers B requests at a time, as a
handler must; for the transform it is a window as wide as the engines, and ``batch_size`` is
null in both rows. ``uneven``: engines with the timing of a GPU and answers of 4 to 256
tokens; Beam's handler at batch size 32, ours at its defaults, and a limit that has every
request in flight at once.

Throughput is taken from the first record's arrival at the driver to the last result, so no
start, no model load and no construction of a pipeline is in it. Each figure is the median
of the repeats. ``--quick`` asks less and takes under five minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from apache_beam_vllm_dynamo import DynamoRuntimeConfig
from benchmarks._drivers import Driver, Load, Measured, measure, measure_unbounded
from benchmarks._served import Served, serving
from tools.small_model import TOKENIZER_DIRECTORY

Scenario = Literal['instant', 'uneven']

ENGINES = 2
INSTANT_TOKENS = 4
SHORTEST_TOKENS, LONGEST_TOKENS = 4, 256
BEAMS_UNEVEN_BATCH = 32
WARM_UP_RECORDS = 64
PROMPT_WORDS = 12
SEED = 0

# Enough for some seconds of each driver: they differ by a factor of forty.
INSTANT_RECORDS: dict[int | None, dict[Driver, int]] = {
    1: {'limit': 800, 'ours': 800, 'beam': 120},
    8: {'limit': 1600, 'ours': 1600, 'beam': 400},
    32: {'limit': 3200, 'ours': 3200, 'beam': 960},
    128: {'limit': 3840, 'ours': 3840, 'beam': 1280},
    None: {'limit': 5000, 'transform': 5000},
}
UNEVEN_RECORDS: dict[Driver, int] = {'limit': 2048, 'transform': 2048, 'ours': 2048, 'beam': 320}
# Of the above, with --quick.
QUICK_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Target:
    """A ratio that the project promises.

    Attributes:
      scenario: Where.
      batch_size: At which batch size of the one that is looked at.
      driver: Whose throughput.
      over: Over whose.
      at_least: The promise.
      over_batch_size: The batch size of the other.
    """

    scenario: Scenario
    batch_size: int | None
    driver: Driver
    over: Driver
    at_least: float
    over_batch_size: int | None


TARGETS = (
    Target('instant', 32, 'ours', 'limit', 0.85, 32),
    Target('instant', 128, 'ours', 'limit', 0.85, 128),
    Target('instant', 1, 'ours', 'beam', 8, 1),
    Target('instant', 8, 'ours', 'beam', 2, 8),
    Target('instant', 32, 'ours', 'beam', 2, 32),
    Target('instant', 128, 'ours', 'beam', 3, 128),
    Target('instant', None, 'transform', 'limit', 0.85, None),
    Target('uneven', None, 'ours', 'beam', 4, BEAMS_UNEVEN_BATCH),
    Target('uneven', None, 'transform', 'limit', 0.95, None),
)

Key = tuple[Scenario, int | None, Driver]
Runs = dict[Key, list[Measured]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes; 0 if every target was reached and nothing failed."""
    options = _parse(arguments)
    logging.disable(logging.WARNING)  # a line for every pipeline from Beam
    share = QUICK_SHARE if options.quick else 1.0
    runs: Runs = {}
    began = time.monotonic()
    with _serving({'speedup-ratio': 1000}) as served:
        load = _load(served, INSTANT_TOKENS)
        _warm_up(load)
        for _ in range(options.repeats):
            _measure_instant(load, share, runs)
    with _serving({}) as served:
        load = _load(served, None)
        _warm_up(load)
        for _ in range(options.repeats):
            _measure_uneven(load, share, runs)
    rows = [row(key, found) for key, found in runs.items()]
    reached = ratios(rows)
    report = {
        'rows': rows,
        'targets': reached,
        'repeats': options.repeats,
        'quick': options.quick,
        'took_s': round(time.monotonic() - began, 1),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + '\n', encoding='utf-8')
    _print(rows, reached)
    whole = all(target['reached'] for target in reached) and not any(r['failed'] for r in rows)
    return 0 if whole else 1


def row(key: Key, found: Sequence[Measured]) -> dict[str, Any]:
    """One line of the report: the medians of the repeats."""
    scenario, batch_size, driver = key
    return {
        'scenario': scenario,
        'batch_size': batch_size,
        'driver': driver,
        'records_per_s': round(statistics.median(m.records_per_s for m in found), 1),
        'client_cpu_ms_per_request': round(
            statistics.median(m.cpu_ms_per_request for m in found), 3
        ),
        'failed': sum(m.failed for m in found),
    }


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What became of each target."""
    speed = {(r['scenario'], r['batch_size'], r['driver']): r['records_per_s'] for r in rows}
    found = []
    for target in TARGETS:
        ratio = (
            speed[target.scenario, target.batch_size, target.driver]
            / speed[target.scenario, target.over_batch_size, target.over]
        )
        found.append(
            {
                **dataclasses.asdict(target),
                'ratio': round(ratio, 3),
                'reached': ratio >= target.at_least,
            }
        )
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.driver_overhead')
    parser.add_argument('--json', type=pathlib.Path, help='write the report there')
    parser.add_argument('--quick', action='store_true', help='ask less: under five minutes')
    parser.add_argument('--repeats', type=int, default=3, help='of each driver; default 3')
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error('--repeats must be at least 1')
    return options


@contextlib.contextmanager
def _serving(simulation_kwargs: dict[str, Any]) -> Iterator[Served]:
    config = DynamoRuntimeConfig.for_devices(
        num_engines=ENGINES, engine_kind='simulated', simulation_kwargs=simulation_kwargs
    )
    with serving(str(TOKENIZER_DIRECTORY), config) as runtime:
        yield Served(runtime.endpoint(), runtime.window)


def _load(served: Served, max_tokens: int | None) -> Load:
    """As many prompts as any driver needs; of random lengths of the answer where not given."""
    records = max(
        *(n for numbers in INSTANT_RECORDS.values() for n in numbers.values()),
        *UNEVEN_RECORDS.values(),
    )
    chance = random.Random(SEED)
    words = ('oak', 'river', 'stone', 'lamp', 'cloud', 'seven', 'green', 'walk', 'open', 'late')
    prompts = [f'{n} {" ".join(chance.choices(words, k=PROMPT_WORDS))}' for n in range(records)]
    lengths = [chance.randint(SHORTEST_TOKENS, LONGEST_TOKENS) for _ in prompts]
    return Load(
        str(TOKENIZER_DIRECTORY), served, prompts, lengths if max_tokens is None else max_tokens
    )


def _warm_up(load: Load) -> None:
    short = dataclasses.replace(load.first(WARM_UP_RECORDS), max_tokens=INSTANT_TOKENS)
    drivers: tuple[Driver, ...] = ('limit', 'beam', 'ours', 'transform')
    for driver in drivers:
        measure(driver, short, BEAMS_UNEVEN_BATCH)


def _measure_instant(load: Load, share: float, runs: Runs) -> None:
    for batch_size, numbers in INSTANT_RECORDS.items():
        for driver, records in numbers.items():
            whole_batches = batch_size or 1
            asked = max(whole_batches, int(records * share) // whole_batches * whole_batches)
            _note(
                runs,
                ('instant', batch_size, driver),
                measure(driver, load.first(asked), batch_size),
            )


def _measure_uneven(load: Load, share: float, runs: Runs) -> None:
    for driver, records in UNEVEN_RECORDS.items():
        # Fewer than a few windows would measure how the load begins and ends.
        asked = load.first(int(records * share) if driver == 'beam' else records)
        if driver == 'limit':
            _note(runs, ('uneven', None, driver), measure_unbounded(asked))
        else:
            batch_size = BEAMS_UNEVEN_BATCH if driver == 'beam' else None
            _note(runs, ('uneven', batch_size, driver), measure(driver, asked, batch_size))


def _note(runs: Runs, key: Key, measured: Measured) -> None:
    runs.setdefault(key, []).append(measured)
    scenario, batch_size, driver = key
    print(
        f'{scenario:8} {batch_size or "-":>4} {driver:10} {measured.records_per_s:9.1f} records/s',
        file=sys.stderr,
        flush=True,
    )


def _print(rows: Sequence[dict[str, Any]], reached: Sequence[dict[str, Any]]) -> None:
    print('scenario batch driver     records/s  client CPU ms  failed')
    for r in rows:
        print(
            f'{r["scenario"]:8} {r["batch_size"] or "-":>5} {r["driver"]:9} '
            f'{r["records_per_s"]:10.1f} {r["client_cpu_ms_per_request"]:14.3f} {r["failed"]:7}'
        )
    for target in reached:
        where = f'{target["scenario"]}, batch {target["batch_size"] or "-"}'
        print(
            f'{where:20} {target["driver"]} / {target["over"]}: {target["ratio"]:.2f}, '
            f'to reach {target["at_least"]}: {"yes" if target["reached"] else "NO"}'
        )


if __name__ == '__main__':
    sys.exit(main())
