"""What is lost and what is left when something dies in the midst of a job.

Run as ``python -m benchmarks.faults --engines simulated --json PATH [--quick]``. Each case is a
Beam pipeline in processes of its own over four simulated engines; one fault happens to it when
a quarter of its prompts are answered, or at once where something is held down. Runs without a
fault are made before, in between and after. ``owner_kills`` is a loop of short runs whose owner
is killed at a random moment. The exit status is 1 where a target is missed, each in a line of
its own.

A long run can be had in parts: ``--cases NAME… --owner-kills N --merge`` adds to the report.
With ``--engines cpu``, by an environment with real engines on CPU cores, only owners are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import _fault_kills, _fault_leftovers, _fault_takeover, _fault_verdict
from benchmarks._fault_document import Document
from benchmarks._fault_injection import CASES, FAULTS, QUICK_CASES
from benchmarks._fault_owner import Engines
from benchmarks._fault_pipeline import ROOT, Settings

JOB_BOUND_S = 400.0
# An answer takes 0.8 s and four engines give 320 a second, so that a run takes half a minute.
FULL = {'prompts': 10_000, 'max_tokens': 40}
# A tenth of the prompts with somewhat longer answers: long enough for a fault and its mend.
QUICK = {'prompts': 1_000, 'max_tokens': 60}
# Where something is held down for half a minute and more, a tenth of the prompts must last.
QUICK_HELD_DOWN = {'prompts': 1_000, 'max_tokens': 500}
COMMON: dict[str, Any] = {'max_num_seqs': 64, 'speedup': 1.0}
OWNER_KILLS = 100
QUICK_OWNER_KILLS = 10
KILLS_AT_ONCE = 2
# How many cases at most lie between two runs without a fault.
CASES_BETWEEN = 3

_RUN = 'import sys; from benchmarks import _fault_job; _fault_job.main(sys.argv[1])'

# What a run that came to nothing has to say.
_NOTHING: dict[str, Any] = {
    'elements_out': 0, 'failed': 0, 'lost': 0, 'doubled': 0, 'foreign': 0,
    'longest_pause_s': None, 'slowest_request_s': None, 'recovery_s': None, 'wall_s': None,
    'start_s': [], 'problem': '', 'first_error': '', 'amiss': '', 'given_up': False,
}  # fmt: skip


def run_case(fault: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Runs one job, with the fault of that name; what fails is part of what it returns."""
    if sizes == QUICK and FAULTS[fault].held_down:
        sizes = QUICK_HELD_DOWN
    case = {
        'name': fault, 'base': FAULTS[fault].base,
        'elements_in': sizes['prompts'], 'max_tokens': sizes['max_tokens'],
        **_NOTHING, 'wall_ratio': None, 'error': '',
    }  # fmt: skip
    with _directory() as directory:
        env = _fault_kills.environment(directory)
        settings = Settings(fault=fault, directory=os.fspath(directory), **sizes, **COMMON)
        log = directory / 'log'
        try:
            if FAULTS[fault].in_processes:
                case |= _fault_takeover.run(settings, env, log)
            else:
                case |= _run(settings, env, log)
        except Exception:  # noqa: BLE001 - one case must not end all others
            said = log.read_text()[-2000:] if log.exists() else ''
            case['error'] = f'{traceback.format_exc(limit=-1)}\n{said}'
        left = _fault_leftovers.wait_until_none(env['TMPDIR'], _fault_kills.GONE_BOUND_S)
    return case | {
        'leftover_processes': left.processes,
        'leftover_sockets': left.sockets,
        'leftover_dirs': left.directories,
    }


def _run(settings: Settings, env: dict[str, str], log: Path) -> dict[str, Any]:
    with log.open('w') as output:
        subprocess.run(
            (sys.executable, '-c', _RUN, settings.to_json()),
            env=env, cwd=ROOT, stdout=output, stderr=output, timeout=JOB_BOUND_S, check=False,
        )  # fmt: skip
    report: dict[str, Any] = json.loads(settings.report.read_text())
    return report


def kill_owners(document: Document, runs: int, engines: Engines) -> None:
    """Kills the owner of a whole stack, so many times, each at another moment."""
    name = 'owner_kills' if engines == 'simulated' else f'owner_kills_{engines}'
    done = (document.content.get(name) or {'runs': 0})['runs']
    # Real engines are killed while they serve first, where there is most to leave behind.
    numbers = (
        range(done, done + runs) if engines == 'simulated' else range(done + 1, done + 1 + runs)
    )

    def kill(number: int) -> str:
        with _directory() as directory:
            env = _fault_kills.environment(directory)
            return _fault_kills.kill_once(number, engines, directory, env)

    with ThreadPoolExecutor(KILLS_AT_ONCE if engines == 'simulated' else 1) as pool:
        for amiss in pool.map(kill, numbers):
            document.add_kill(name, amiss)
    print(name, json.dumps(document.content.get(name)), flush=True)


def schedule(cases: Sequence[str], *, quick: bool) -> Iterator[str]:
    """The cases, with the runs that they are compared with before, in between and after.

    A quick run has one of these, before all others.
    """
    if quick and cases:
        yield 'none'
        yield from cases
        return
    for base in dict.fromkeys(FAULTS[name].base for name in cases):
        its = [name for name in cases if FAULTS[name].base == base]
        for number, name in enumerate(its):
            if number % CASES_BETWEEN == 0:
                yield base
            yield name
        yield base


def line_of(run: dict[str, Any]) -> str:
    """What people want to know of a run, in a line."""

    def shown(name: str) -> str:
        value = run[name]
        return '-' if value is None else f'{value:.2f}'

    left = [run[f'leftover_{what}'] for what in ('processes', 'sockets', 'dirs')]
    return (
        f'{run["name"]}: {run["elements_out"]} of {run["elements_in"]} out, '
        f'{run["failed"]} failed, {run["lost"]} lost; longest pause {shown("longest_pause_s")} s, '
        f'slowest request {shown("slowest_request_s")} s, whole again after '
        f'{shown("recovery_s")} s, {shown("wall_s")} s in all ({shown("wall_ratio")} of the run '
        f'without); left: {"/".join(map(str, left))}'
    )


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    # Where paths are too long for sockets a stack makes its directory elsewhere, unseen.
    with tempfile.TemporaryDirectory(
        prefix='faults-', dir='/tmp', ignore_cleanup_errors=True
    ) as name:
        yield Path(name)


def main(arguments: list[str]) -> int:
    """Runs all that is asked for and writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--engines', choices=['simulated', 'cpu'], default='simulated')
    parser.add_argument('--json', type=Path, required=True, help='the report')
    parser.add_argument('--quick', action='store_true', help='a tenth of the prompts and kills')
    parser.add_argument(
        '--cases',
        nargs='*',
        choices=CASES,
        help='which; all by default, or with --quick the most important ones',
    )
    parser.add_argument('--owner-kills', type=int, help='how many')
    parser.add_argument('--merge', action='store_true', help='add to the report that is there')
    given = parser.parse_args(arguments)
    simulated = given.engines == 'simulated'
    if given.cases and not simulated:
        parser.error('--engines cpu kills owners only; leave --cases out')
    cases = given.cases
    if cases is None:
        cases = (QUICK_CASES if given.quick else CASES) if simulated else ()
    kills = given.owner_kills
    if kills is None:
        kills = (QUICK_OWNER_KILLS if given.quick else OWNER_KILLS) if simulated else 1
    sizes = QUICK if given.quick else FULL
    document = Document(given.json, sizes, merge=given.merge)
    began_s = time.monotonic()
    for name in schedule(cases, quick=given.quick):
        print(line_of(document.add(run_case(name, sizes))), flush=True)
    kill_owners(document, kills, given.engines)
    print(f'{time.monotonic() - began_s:.0f} s')
    missed = _fault_verdict.missed(document.content)
    for line in missed:
        print(f'missed: {line}')
    return bool(missed)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
