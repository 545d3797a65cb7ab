"""What it is worth that prompts which begin alike meet, through real Beam pipelines.

Run as ``python -m benchmarks.prefix_locality [--loads A,C] [--quick] [--repeats N] [--json PATH]``.
Each load is put to four simulated engines, in their own time, once for each arm and on a fresh
stack each time; what an arm gains is told over ``rr_shuffled``, measured in the same run. PATH is
written after each load, and keeps the loads that it holds already and that are not measured again.
Exits with 1 when something failed or, without ``--quick``, when a target was missed.

Arms: ``rr_shuffled`` is round-robin with the prompts as they come; ``kv`` the KV router with this
package's defaults, prompts as they come; ``ordered`` that with what waits put in order (the
handlers' default); ``transform`` that behind ``PrefixBatchElements``; ``beam_rr`` Beam's own
handler, pointed at the same kind of round-robin frontend.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks._prefix_arms import ARMS, Arm, Measured, measure
from benchmarks._prefix_loads import LOADS, Load

QUICK_SHARE = 0.5
SEED = 1

# load, arm, over which arm, at least
TARGETS: tuple[tuple[str, Arm, Arm, float], ...] = (
    ('A', 'kv', 'rr_shuffled', 3.6),
    ('A', 'ordered', 'rr_shuffled', 4.0),
    ('B', 'ordered', 'rr_shuffled', 1.35),
    ('C', 'ordered', 'rr_shuffled', 0.97),
    ('D', 'ordered', 'rr_shuffled', 0.97),
    ('E', 'ordered', 'rr_shuffled', 1.12),
    ('F', 'ordered', 'rr_shuffled', 5.0),
    ('G', 'transform', 'ordered', 1.8),
    ('real', 'kv', 'rr_shuffled', 1.3),
    ('real', 'ordered', 'rr_shuffled', 1.9),
)
# load, arm, at least so much of the ceiling
CACHED_TARGETS: tuple[tuple[str, Arm, float], ...] = (
    ('A', 'ordered', 0.92 / 0.949),
    ('B', 'ordered', 0.9),
)
# load, arm, at most so uneven
SHARE_TARGETS: tuple[tuple[str, Arm, float], ...] = (('D', 'ordered', 1.2),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes."""
    options = _parse(arguments)
    found: dict[str, dict[Arm, list[Measured]]] = {}
    known = _loads_of(options.json)
    loads = {
        name: LOADS[name].reduced(QUICK_SHARE) if options.quick else LOADS[name]
        for name in options.loads
    }
    for repeat in range(options.repeats):
        for name, load in loads.items():
            for arm in options.arms:
                measured = measure(arm, load, load.prompts(SEED + repeat))
                found.setdefault(name, {}).setdefault(arm, []).append(measured)
                _note(name, arm, load, measured)
            known[name] = {arm: summary(load, runs) for arm, runs in found[name].items()}
            report = {'loads': known, 'targets': reached(known)}
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=2) + '\n', encoding='utf-8')
    targets = reached(known)
    _print(known, targets)
    failed = any(m.failed for arms in found.values() for runs in arms.values() for m in runs)
    missed = not options.quick and not all(target['reached'] for target in targets)
    return 1 if failed or missed else 0


def _loads_of(path: pathlib.Path | None) -> dict[str, Any]:
    """What an earlier run has left there."""
    if path is None or not path.exists():
        return {}
    loads: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))['loads']
    return loads


def summary(load: Load, runs: Sequence[Measured]) -> dict[str, Any]:
    """The medians of an arm's repeats; failures are summed."""
    return {
        'records_per_s': round(statistics.median(m.records_per_s for m in runs), 1),
        'cached_share': round(statistics.median(m.cached_share for m in runs), 4),
        'ceiling': round(load.ceiling, 4),
        'failed': sum(m.failed for m in runs),
        'engine_share_max_over_min': round(
            statistics.median(m.engine_share_max_over_min for m in runs), 3
        ),
        'all_records_per_s': [round(m.records_per_s, 1) for m in runs],
    }


def reached(loads: dict[str, dict[Arm, dict[str, Any]]]) -> list[dict[str, Any]]:
    """What became of each target whose arms were measured."""
    found = []
    for name, arm, over, least in TARGETS:
        arms = loads.get(name, {})
        if arm in arms and over in arms:
            ratio = arms[arm]['records_per_s'] / arms[over]['records_per_s']
            found.append(_target(f'{name}: {arm} over {over}', ratio, least, ratio >= least))
    for name, arm, least in CACHED_TARGETS:
        if arm in loads.get(name, {}):
            row = loads[name][arm]
            share = row['cached_share'] / row['ceiling']
            found.append(_target(f'{name}: {arm}, cached of ceiling', share, least, share >= least))
    for name, arm, most in SHARE_TARGETS:
        if arm in loads.get(name, {}):
            share = loads[name][arm]['engine_share_max_over_min']
            found.append(_target(f'{name}: {arm}, engine share', share, most, share <= most))
    return found


def _target(what: str, value: float, bound: float, is_reached: bool) -> dict[str, Any]:  # noqa: FBT001 - three numbers of one row
    return {
        'what': what,
        'value': round(value, 3),
        'bound': round(bound, 3),
        'reached': is_reached,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.prefix_locality')
    parser.add_argument(
        '--json', type=pathlib.Path, help='write the report there; its other loads stay'
    )
    parser.add_argument('--quick', action='store_true', help='half of the requests')
    parser.add_argument('--repeats', type=int, help='default 3; 1 with --quick')
    simulated = [name for name, load in LOADS.items() if load.engine_kind == 'simulated']
    parser.add_argument(
        '--loads',
        default=','.join(simulated),
        help='such as A,C; default all on simulated engines. `real` is on vLLM on two CPU cores',
    )
    parser.add_argument('--arms', default=','.join(ARMS), help='default all')
    options = parser.parse_args(arguments)
    if options.repeats is None:
        options.repeats = 1 if options.quick else 3
    if options.repeats < 1:
        parser.error('--repeats must be at least 1')
    for name, known in (('loads', LOADS), ('arms', ARMS)):
        given = getattr(options, name).split(',')
        unknown = [part for part in given if part not in known]
        if unknown:
            parser.error(f'--{name} has {unknown[0]!r}: choose of {", ".join(known)}')
        setattr(options, name, given)
    return options


def _note(name: str, arm: Arm, load: Load, measured: Measured) -> None:
    print(
        f'{name} {arm:12} {measured.records_per_s:7.1f} records/s, '
        f'cached {measured.cached_share:.3f} of {load.ceiling:.3f}, '
        f'engines {measured.engine_share_max_over_min:.2f}, failed {measured.failed}',
        file=sys.stderr,
        flush=True,
    )


def _print(loads: dict[str, dict[Arm, dict[str, Any]]], targets: Sequence[dict[str, Any]]) -> None:
    print('load arm          records/s  gain  cached  ceiling  engines  failed')
    for name, arms in loads.items():
        base = arms.get('rr_shuffled', {}).get('records_per_s')
        for arm, row in arms.items():
            gain = f'{row["records_per_s"] / base:5.2f}' if base else '    -'
            print(
                f'{name:4} {arm:12} {row["records_per_s"]:10.1f} {gain} '
                f'{row["cached_share"]:7.3f} {row["ceiling"]:8.3f} '
                f'{row["engine_share_max_over_min"]:8.2f} {row["failed"]:7}'
            )
    for target in targets:
        print(
            f'{target["what"]:32} {target["value"]:.3f}, bound {target["bound"]:.3f}: '
            f'{"reached" if target["reached"] else "MISSED"}'
        )


if __name__ == '__main__':
    logging.disable(logging.WARNING)  # a line for every pipeline from Beam
    sys.exit(main())
