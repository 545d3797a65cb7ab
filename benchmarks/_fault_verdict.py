"""What the report of faults is measured by; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks._fault_injection import FAULTS

ENGINE_DEATHS = (
    'engine_killed', 'two_engines_killed', 'engine_stopped', 'engines_killed_in_turn',
)  # fmt: skip
LONGEST_PAUSE_S = 2.0  # for an engine's death
RECOVERY_BEYOND_START_S = 5.0
WALL_RATIO = 1.3  # for one engine's death
ONE_ENGINE_KILLED = ('engine_killed', 'engines_killed_in_turn')
UNSURVIVABLE = ('engine_dies_on_every_start',)


def missed(document: Mapping[str, Any]) -> list[str]:
    """Each target that a report misses, in a line; what was not run is not judged."""
    found = [f'{run["name"]}: {line}' for run in document['base_runs'] for line in _lost(run)]
    for case in document['cases']:
        found += [f'{case["name"]}: {line}' for line in _missed_by(case, document['base'])]
    for name in ('owner_kills', 'owner_kills_cpu'):
        kills = document.get(name)
        if kills and kills['clean'] < kills['runs']:
            found.append(f'{name}: {kills["clean"]} of {kills["runs"]} left nothing behind')
    return found


def _missed_by(case: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    name = case['name']
    if case['error']:
        yield f'did not run: {_first_line(case["error"])}'
    elif name in UNSURVIVABLE:
        if not (case['given_up'] and case['problem']):
            yield 'the job did not fail with a reason'
    else:
        yield from _lost(case)
        yield from _slow(case, base.get(case['base']) or base.get('none'))
        yield from _drawn_in(case)
        yield from _grown(case)
    for what in ('processes', 'sockets', 'dirs'):
        if case[f'leftover_{what}']:
            yield f'{case[f"leftover_{what}"]} {what} were left'


def _lost(run: Mapping[str, Any]) -> Iterator[str]:
    if run['error']:
        yield f'did not run: {_first_line(run["error"])}'
        return
    if run['problem']:
        yield f'the job failed: {_first_line(run["problem"])}'
    for what in ('lost', 'doubled', 'foreign', 'failed'):
        if run[what]:
            yield f'{run[what]} elements {what}: {run["elements_out"]} of {run["elements_in"]} out'


def _slow(case: Mapping[str, Any], base: Mapping[str, Any] | None) -> Iterator[str]:
    if case['amiss']:
        yield f'not whole again: {case["amiss"]}'
    recovery_s, pause_s, ratio = (
        case[figure] for figure in ('recovery_s', 'longest_pause_s', 'wall_ratio')
    )
    bound_s = base['start_s'] + RECOVERY_BEYOND_START_S if base is not None else math.inf
    if recovery_s is not None and recovery_s > bound_s:
        yield f'whole again after {recovery_s:.1f} s; to reach: {bound_s:.1f} s'
    if case['name'] in ENGINE_DEATHS and (pause_s is None or pause_s >= LONGEST_PAUSE_S):
        yield f'a pause of {pause_s} s; to reach: under {LONGEST_PAUSE_S} s'
    if case['name'] in ONE_ENGINE_KILLED and ratio is not None and ratio > WALL_RATIO:
        yield f'{ratio:.2f} times as long as without; to reach: {WALL_RATIO}'


def _drawn_in(case: Mapping[str, Any]) -> Iterator[str]:
    others = case.get('restarts_of_others') or 0
    # While etcd is away for longer than their leases, engines and frontend end by themselves.
    if others and not FAULTS[case['name']].held_down:
        yield f'others than the victims were started again {others} times'


def _grown(case: Mapping[str, Any]) -> Iterator[str]:
    if (case.get('most_sets_of_engines') or 0) > 1:
        yield f'{case["most_sets_of_engines"]} sets of engines lived at the same time'
    for what in ('descriptors', 'threads'):
        before, after = case.get(what) or (0, 0)
        if after > before:
            yield f'{what} of the owner grew from {before} to {after}'


def _first_line(text: str) -> str:
    return text.strip().partition('\n')[0][:300]
