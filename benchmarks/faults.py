"""What is lost and what is left when something dies in the midst of a job.

Run as ``python -m benchmarks.faults --engines simulated --json PATH [--quick]``. Each case is a
Beam pipeline in a process of its own over four simulated engines; one fault happens to it when
a quarter of its prompts are answered. ``owner_kills`` is a loop of short runs whose owner is
killed at a random moment.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import _fault_leftovers
from benchmarks._fault_injection import FAULTS
from benchmarks._fault_job import INJECT_AT, Settings
from benchmarks._fault_owner import SERVES, STARTING

ROOT = Path(__file__).parents[1]
JOB_BOUND_S = 400.0
GONE_BOUND_S = 10.0  # within which everything of a killed owner must have ended
# An answer takes 0.8 s and four engines give 350 a second, so that a run takes half a minute.
FULL = {'prompts': 10_000, 'max_tokens': 40}
# A tenth of the prompts with longer answers: long enough for a fault and its mend.
QUICK = {'prompts': 1_000, 'max_tokens': 200}
COMMON: dict[str, Any] = {'max_num_seqs': 64, 'speedup': 1.0}
OWNER_KILLS = 100
QUICK_OWNER_KILLS = 10
# To give an engine up takes half a minute, in which the others could answer all of a tenth.
LEAST_UNTIL_GIVEN_UP = 5_000
START_S = 2.5  # of a stack of two engines

_RUN = 'import sys; from benchmarks import _fault_job; _fault_job.main(sys.argv[1])'
_OWN = 'from benchmarks import _fault_owner; _fault_owner.main()'


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the report."""

    name: str
    elements_in: int
    elements_out: int
    failed: int
    longest_pause_s: float | None
    recovery_s: float | None
    wall_s: float
    wall_ratio: float | None
    leftover_processes: int
    leftover_sockets: int
    leftover_dirs: int
    problem: str = ''


def run_case(fault: str, sizes: dict[str, Any], baseline_s: float | None) -> Case:
    """Runs one pipeline with one fault."""
    if not FAULTS[fault].survivable:
        sizes = {**sizes, 'prompts': max(sizes['prompts'], LEAST_UNTIL_GIVEN_UP)}
    with _environment() as (directory, env):
        settings = Settings(fault=fault, directory=os.fspath(directory), **sizes, **COMMON)
        started = time.monotonic()
        run = _killed_and_run_again if fault == 'owner_killed' else _run
        report = run(settings, env, directory)
        left = _fault_leftovers.wait_until_none(env['TMPDIR'], GONE_BOUND_S)
        wall_s = report.get('wall_s', time.monotonic() - started)
    return Case(
        name=fault,
        elements_in=report['elements_in'],
        elements_out=report['elements_out'],
        failed=report['failed'],
        longest_pause_s=report['longest_pause_s'],
        recovery_s=report['recovery_s'],
        wall_s=wall_s,
        wall_ratio=wall_s / baseline_s if baseline_s else None,
        leftover_processes=left.processes,
        leftover_sockets=left.sockets,
        leftover_dirs=left.directories,
        problem=report['problem'] or report['first_error'] or report['found'],
    )


def _run(settings: Settings, env: dict[str, str], directory: Path) -> dict[str, Any]:
    log = directory / 'log'
    with log.open('w') as output:
        subprocess.run(
            (sys.executable, '-c', _RUN, json.dumps(dataclasses.asdict(settings))),
            env=env, stdout=output, stderr=output, timeout=JOB_BOUND_S, check=False,
        )  # fmt: skip
    if not settings.report.exists():
        raise RuntimeError(f'{settings.fault}: no report\n{log.read_text()[-3000:]}')
    report: dict[str, Any] = json.loads(settings.report.read_text())
    return report


def _killed_and_run_again(
    settings: Settings, env: dict[str, str], directory: Path
) -> dict[str, Any]:
    """The owner dies in full swing, and the work is given to another, as a runner does."""
    log = directory / 'log-of-the-killed'
    with log.open('w') as output:
        owner = subprocess.Popen(
            (sys.executable, '-c', _RUN, json.dumps(dataclasses.asdict(settings))),
            env=env, stdout=output, stderr=output,
        )  # fmt: skip
        deadline = time.monotonic() + JOB_BOUND_S
        while _answered(settings) < INJECT_AT * settings.prompts:
            if owner.poll() is not None or time.monotonic() > deadline:
                owner.kill()
                raise RuntimeError(f'it ended by itself\n{log.read_text()[-3000:]}')
            time.sleep(0.02)
        owner.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        owner.wait()
    settings.progress.unlink()
    again = dataclasses.replace(settings)
    report = _run(again, env, directory)
    report['recovery_s'] = report['ready_at_s'] - killed
    report['wall_s'] = time.monotonic() - killed
    return report


def _answered(settings: Settings) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int(settings.progress.read_text())
    return 0


def kill_owners(runs: int) -> dict[str, Any]:
    """Kills the owner of a whole stack, so many times, each at another moment.

    Raises:
      RuntimeError: An owner ended by itself, so that there was nothing to kill.
    """
    clean, unclean = 0, []
    rng = random.Random(0)
    for number in range(runs):
        with _environment() as (_, env):
            owner = subprocess.Popen(
                (sys.executable, '-c', _OWN), env=env, cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert owner.stdout is not None
            # Every other one in the midst of its start, the others once they serve.
            said = [owner.stdout.readline().strip()]
            if number % 2:
                said.append(owner.stdout.readline().strip())
            time.sleep(rng.random() * START_S)
            killed = owner.poll() is None and said == [STARTING, SERVES][: len(said)]
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            owner.stdout.close()
            if not killed:
                raise RuntimeError(f'owner {number} ended by itself; it said {said}')
            left = _fault_leftovers.wait_until_none(env['TMPDIR'], GONE_BOUND_S)
            if left == _fault_leftovers.NOTHING:
                clean += 1
            else:
                unclean.append({'run': number, **dataclasses.asdict(left)})
    return {'runs': runs, 'clean': clean, 'unclean': unclean}


@contextlib.contextmanager
def _environment() -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory for a run's files, and an environment with a temporary directory of its own."""
    with tempfile.TemporaryDirectory(prefix='faults-', ignore_cleanup_errors=True) as name:
        directory = Path(name)
        temporary = directory / 't'
        temporary.mkdir()
        yield directory, {**os.environ, 'TMPDIR': os.fspath(temporary)}


def main(arguments: list[str]) -> None:
    """Runs all cases and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--engines', choices=['simulated'], default='simulated')
    parser.add_argument('--json', type=Path, required=True)
    parser.add_argument('--quick', action='store_true')
    parser.add_argument('--cases', nargs='*', default=[n for n in FAULTS if n != 'none'])
    parser.add_argument('--owner-kills', type=int)
    given = parser.parse_args(arguments)
    kills = given.owner_kills
    if kills is None:
        kills = QUICK_OWNER_KILLS if given.quick else OWNER_KILLS
    sizes = QUICK if given.quick else FULL
    report: dict[str, Any] = {'cases': [], 'owner_kills': None}

    def note(make: Callable[[], Case]) -> Case:
        case = make()
        report['cases'].append(dataclasses.asdict(case))
        given.json.write_text(json.dumps(report, indent=2) + '\n')
        print(json.dumps(report['cases'][-1]), flush=True)
        return case

    baseline = note(lambda: run_case('none', sizes, None)) if given.cases else None
    for name in given.cases:
        note(lambda name=name: run_case(name, sizes, baseline.wall_s if baseline else None))  # type: ignore[misc]  # mypy takes no default of a lambda
    report['owner_kills'] = kill_owners(kills)
    given.json.write_text(json.dumps(report, indent=2) + '\n')
    print(json.dumps(report['owner_kills']), flush=True)


if __name__ == '__main__':
    main(sys.argv[1:])
