"""Several SDK processes on one server, whose owner is killed in the midst of the job.

Beam's own local runners end a job when one of its SDK processes dies (FnApiRunner, with
processes or a worker pool: 'Channel closed prematurely.'), and those that repeat a bundle
elsewhere, as Dataflow and Flink do, need a cluster. So :class:`Runner` stands in for that part
of a runner: it gives out bundles, keeps what comes out of a whole bundle only, gives a bundle
that failed out again, at most four times as Dataflow does, and starts an SDK process anew in
the place of one that died. What runs in the SDK processes is a pipeline a bundle with Beam's own
``RunInference``, over one server for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apache_beam_vllm_dynamo._marker import MARKER
from benchmarks import _fault_leftovers, _fault_tally
from benchmarks._fault_injection import FAULTS, IN_THE_MIDST_S, LOOK_INTERVAL_S, RECOVERY_BOUND_S
from benchmarks._fault_pipeline import ROOT, Settings, starts_of
from benchmarks._fault_sdk_process import MARK

PROCESSES = 3
BUNDLES = 20
KILL_AFTER = 5  # bundles
ATTEMPTS = 4
END_S = 60.0
STANDS_IN = (
    'No runner that repeats bundles after the death of an SDK process can be had without a '
    'cluster: bundles are given out, and out again, by the benchmark itself.'
)

_RUN = 'import sys; from benchmarks import _fault_sdk_process as p; p.main(sys.argv[1])'


@dataclasses.dataclass
class Bundle:
    """Elements that are committed together.

    Attributes:
      elements: They.
      attempts: How often it was given out.
    """

    elements: list[str]
    attempts: int = 0


class SdkProcess:
    """One SDK process, as the runner sees it."""

    def __init__(self, settings: Settings, env: Mapping[str, str], log: Path) -> None:
        with log.open('a') as errors:
            self._process = subprocess.Popen(
                (sys.executable, '-c', _RUN, settings.to_json()),
                env=dict(env), cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def work_on(self, bundle: Bundle) -> dict[str, Any] | None:
        """Gives it a bundle; what it says of it, or ``None`` if it dies meanwhile."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(bundle.elements) + '\n')
            stdin.flush()
            for line in stdout:
                if line.startswith(MARK):
                    said: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return said
        return None

    def kill(self) -> None:
        """Kills it."""
        self._process.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Lets it end by itself, or kills it after a while."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=END_S)

    def close(self) -> None:
        """Frees what is left of it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert stream is not None
                stream.close()


class Runner:
    """Gives out the bundles of a job until each is committed, or one has failed too often."""

    def __init__(self, settings: Settings, env: Mapping[str, str], log: Path) -> None:
        self._settings = settings
        self._env = env
        self._log = log
        self._waiting: list[Bundle] = []
        self._left = 0
        self._changed = threading.Condition()
        self._processes: dict[int, SdkProcess] = {}
        self.committed: list[dict[str, Any]] = []
        self.committed_at_s = time.monotonic()
        self.repeated: list[str] = []
        self.problem = ''

    def add(self, bundles: Iterable[Sequence[str]]) -> None:
        """Adds to the work, before it begins."""
        self._waiting += [Bundle(list(elements)) for elements in bundles]
        self._left = len(self._waiting)

    def run(self) -> None:
        """Returns when the job is over."""
        threads = [threading.Thread(target=self._drive, args=(i,)) for i in range(PROCESSES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def kill(self, pid: int) -> None:
        """Kills one of the SDK processes."""
        [victim] = [process for process in self._processes.values() if process.pid == pid]
        victim.kill()

    def wait_for(self, bundles: int) -> bool:
        """Waits until so many are committed; false if that will never be."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.committed) >= bundles or self.problem)
            return not self.problem

    def _drive(self, place: int) -> None:
        process = self._start(place)
        try:
            while (bundle := self._take()) is not None:
                said = process.work_on(bundle)
                if said is None:
                    process.close()
                    self._failed(bundle, 'its SDK process died')
                    process = self._start(place)
                elif said['problem']:
                    self._failed(bundle, said['problem'])
                else:
                    self._commit(said)
            process.end()
        except Exception as error:  # noqa: BLE001 - it belongs to the report of the case
            with self._changed:
                self.problem = self.problem or repr(error)
                self._changed.notify_all()
        finally:
            process.close()

    def _start(self, place: int) -> SdkProcess:
        process = self._processes[place] = SdkProcess(self._settings, self._env, self._log)
        return process

    def _take(self) -> Bundle | None:
        """The next bundle, as soon as there is one; ``None`` when the job is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._left or self.problem)
            if not self._waiting or self.problem:
                return None
            bundle = self._waiting.pop(0)
            bundle.attempts += 1
            return bundle

    def _failed(self, bundle: Bundle, problem: str) -> None:
        with self._changed:
            self.repeated.append(problem)
            if bundle.attempts >= ATTEMPTS:
                self.problem = self.problem or f'a bundle failed {ATTEMPTS} times: {problem}'
            self._waiting.append(bundle)
            self._changed.notify_all()

    def _commit(self, said: dict[str, Any]) -> None:
        with self._changed:
            self.committed.append(said)
            self.committed_at_s = time.monotonic()
            self._left -= 1
            self._changed.notify_all()


class Takeover:
    """Kills the owner in the midst of a job, and watches who owns engines until others do."""

    def __init__(self, settings: Settings, temporary: str, runner: Runner) -> None:
        self._settings = settings
        self._temporary = temporary
        self._runner = runner
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.recovery_s: float | None = None
        self.began_after_s: float | None = None
        self.most_sets = 0
        self.amiss = 'the owner was never killed'

    def start(self) -> None:
        """Begins to wait for the moment."""
        self._thread.start()

    def finish(self) -> None:
        """Returns when another owns the engines, or had the time to."""
        self._thread.join()

    def _run(self) -> None:
        if not self._runner.wait_for(KILL_AFTER):
            return
        time.sleep(IN_THE_MIDST_S)
        before = starts_of(self._settings)
        self._runner.kill(before[-1].pid)
        killed_s = time.monotonic()
        self.amiss = 'nobody took over'
        while time.monotonic() - killed_s < RECOVERY_BOUND_S:
            # What ends counts too: it is what a new start could meet on the devices.
            self.most_sets = max(self.most_sets, len(owners_of_engines(self._temporary)))
            since = starts_of(self._settings)[len(before) :]
            if since:
                self.began_after_s = since[0].began_s - killed_s
                self.recovery_s = since[0].ready_s - killed_s
                self.amiss = ''
                return
            time.sleep(LOOK_INTERVAL_S)


def owners_of_engines(temporary: str) -> set[str]:
    """The owners of the simulated engines that have this temporary directory."""
    owners = set()
    for path in Path('/proc').glob('[0-9]*/environ'):
        with contextlib.suppress(OSError):
            environment = path.read_bytes()
            if not _fault_leftovers.belongs_to(temporary, environment):
                continue
            owner = re.search(rf'{MARKER}=(\d+)\.'.encode(), environment)
            if owner and b'dynamo.mocker' in path.with_name('cmdline').read_bytes():
                owners.add(os.fsdecode(owner[1]))
    return owners


def run(settings: Settings, env: Mapping[str, str], log: Path) -> dict[str, Any]:
    """Runs the job, with the fault in its midst where there is one, and says what was seen."""
    started_s = time.monotonic()
    prompts = _fault_tally.prompts_of(settings.prompts)
    size = -(-len(prompts) // BUNDLES)
    runner = Runner(settings, env, log)
    runner.add(prompts[start : start + size] for start in range(0, len(prompts), size))
    takeover = None
    if settings.fault != FAULTS[settings.fault].base:
        takeover = Takeover(settings, env['TMPDIR'], runner)
        takeover.start()
    runner.run()
    if takeover is not None:
        takeover.finish()
    came_out = [element for said in runner.committed for element in said['came_out']]
    answered_at_ms = [stamp for said in runner.committed for stamp in said['answered_at_ms']]
    return {
        **vars(_fault_tally.compare(prompts, came_out)),
        'failed': sum(said['failed'] for said in runner.committed),
        'first_error': next((s['first_error'] for s in runner.committed if s['failed']), ''),
        'problem': runner.problem,
        'wall_s': runner.committed_at_s - started_s,
        'start_s': [start.took_s for start in starts_of(settings)],
        'longest_pause_s': _fault_tally.longest_pause_s(answered_at_ms),
        'slowest_request_s': max((s['slowest_request_s'] for s in runner.committed), default=None),
        'repeated_bundles': runner.repeated,
        'note': STANDS_IN,
        'recovery_s': takeover.recovery_s if takeover else None,
        'next_start_began_after_s': takeover.began_after_s if takeover else None,
        'amiss': takeover.amiss if takeover else '',
        'most_sets_of_engines': takeover.most_sets if takeover else None,
    }
