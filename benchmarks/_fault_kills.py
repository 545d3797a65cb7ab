"""Killing the owner of a stack, again and again, and looking for what is left of it."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import _fault_leftovers
from benchmarks._fault_owner import SERVES, STARTING, Engines
from benchmarks._fault_pipeline import ROOT

GONE_BOUND_S = 10.0  # within which everything of a killed owner must have ended
# How long the start of a stack takes; a moment in it is drawn at random.
START_S: dict[Engines, float] = {'simulated': 2.5, 'cpu': 30.0}

_OWN = 'import sys; from benchmarks import _fault_owner; _fault_owner.main(sys.argv[1])'


def kill_once(number: int, engines: Engines, directory: Path, env: dict[str, str]) -> str:
    """Kills one owner at a random moment: in its start where the number is even.

    Returns:
      What was amiss, or nothing.
    """
    rng = random.Random(number)
    with (directory / 'log').open('w') as log:
        owner = subprocess.Popen(
            (sys.executable, '-c', _OWN, engines), env=env, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert owner.stdout is not None
    try:
        expected = [STARTING, SERVES] if number % 2 else [STARTING]
        said = [owner.stdout.readline().strip() for _ in expected]
        time.sleep(rng.random() * START_S[engines])
        if said != expected or owner.poll() is not None:
            tail = (directory / 'log').read_text()[-1000:]
            return f'the owner ended by itself; it said {said}\n{tail}'
        if SERVES in said and not all(dataclasses.astuple(_fault_leftovers.look(env['TMPDIR']))):
            return 'a stack that serves was not seen, so that nothing of it would be found'
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    killed_s = time.monotonic()
    left = _fault_leftovers.wait_until_none(env['TMPDIR'], GONE_BOUND_S)
    if left != _fault_leftovers.NOTHING:
        return f'left after {time.monotonic() - killed_s:.1f} s: {dataclasses.asdict(left)}'
    return ''


def add(kills: dict[str, Any] | None, amiss: str) -> dict[str, Any]:
    """The tally of kills with one more."""
    kills = kills or {'runs': 0, 'clean': 0, 'unclean': []}
    run = kills['runs']
    return {
        'runs': run + 1,
        'clean': kills['clean'] + (not amiss),
        'unclean': kills['unclean'] + ([{'run': run, 'amiss': amiss}] if amiss else []),
    }


def environment(directory: Path) -> dict[str, str]:
    """With a temporary directory of its own, by which all that belongs to a run is found."""
    temporary = directory / 't'
    temporary.mkdir()
    return {**os.environ, 'TMPDIR': os.fspath(temporary)}
