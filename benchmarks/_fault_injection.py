"""The faults, and watching a stack until it is whole again.

Seconds until the stack is whole count from the blow, the first of two; for what is held down,
from the moment at which it could start again.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from apache_beam_vllm_dynamo import _probes
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._restart import ChildStatus

LOOK_INTERVAL_S = 0.05
RECOVERY_BOUND_S = 120.0
DOWN_S = 40.0  # longer than the lease, after which engines and frontend end by themselves
SECOND_KILL_AFTER_S = 1.0
# A moment is found between two batches; this much later the next one is in full swing.
IN_THE_MIDST_S = 0.4
QUIET_S = 2.0  # in which what is open for a moment only is seen closed at least once

# What an engine does that cannot start: its interpreter ends before it has begun.
_STILLBORN = """
import os, sys
if os.path.exists({flag!r}) and 'dynamo.mocker' in ' '.join(sys.orig_argv):
    print('the simulated engine is broken', flush=True)
    os._exit(3)
"""
_BROKEN_ETCD = """#!/bin/sh
if [ -e '{flag}' ]; then exit 1; fi
exec '{etcd}' "$@"
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      victims: The labels of the processes that it hits.
      signal: What they get.
      held_down: Whether they cannot start again meanwhile.
      survivable: Whether the job must get through it.
      again: How often each engine is killed once more, one after the other, when the job is
        over and nothing but the stack is left in the process.
      in_processes: Whether it happens to several SDK processes that share a server, one of
        which owns it.
    """

    victims: tuple[str, ...] = ()
    signal: int = signal.SIGKILL
    held_down: bool = False
    survivable: bool = True
    again: int = 0
    in_processes: bool = False

    @property
    def base(self) -> str:
        """The run without a fault that it is compared with."""
        return 'none_in_processes' if self.in_processes else 'none'


FAULTS = {
    'none': Fault(),
    'none_in_processes': Fault(in_processes=True),
    'engine_killed': Fault(('engine 1 of 4',)),
    'two_engines_killed': Fault(('engine 1 of 4', 'engine 3 of 4')),
    'engine_stopped': Fault(('engine 2 of 4',), signal.SIGSTOP),
    'frontend_killed': Fault(('frontend',)),
    'event_broker_killed': Fault(('event broker',)),
    'etcd_killed': Fault(('etcd',)),
    'etcd_down_40_s': Fault(('etcd',), held_down=True),
    'engine_dies_on_every_start': Fault(('engine 4 of 4',), held_down=True, survivable=False),
    'engines_killed_in_turn': Fault(('engine 1 of 4',), again=2),
    'owner_killed': Fault(in_processes=True),  # whoever gives out the work does it
}
BASES = tuple(name for name, fault in FAULTS.items() if name == fault.base)
CASES = tuple(name for name in FAULTS if name not in BASES)
QUICK_CASES = tuple(
    name for name in CASES if name not in ('event_broker_killed', 'engines_killed_in_turn')
)


def config_fields(fault: str, down: Path) -> dict[str, Any]:
    """What the config of a stack needs so that the fault can hold its victims down."""
    if not FAULTS[fault].held_down:
        return {}
    directory = down.parent
    if 'etcd' in fault:
        program = directory / 'etcd'
        etcd = find_etcd(None, os.environ.get('PATH'))
        program.write_text(_BROKEN_ETCD.format(flag=down, etcd=etcd))
        program.chmod(0o755)
        return {'etcd_path': program}
    modules = directory / 'modules'
    modules.mkdir()
    (modules / 'sitecustomize.py').write_text(_STILLBORN.format(flag=os.fspath(down)))
    return {'env': {'PYTHONPATH': os.fspath(modules)}}


class Injector:
    """Waits for its moment, does the damage and watches until the stack is whole again.

    Args:
      fault: A name of :data:`FAULTS`.
      down: The file that keeps victims from starting.
      model: Gives the model once it is there.
      is_time: Whether the moment has come.
    """

    def __init__(
        self,
        fault: str,
        down: Path,
        model: Callable[[], Any],
        is_time: Callable[[], bool],
    ) -> None:
        self._fault = FAULTS[fault]
        self._down = down
        self._model = model
        self._is_time = is_time
        self._over = threading.Event()
        self._done = threading.Event()
        self._injected_at_ms: int | None = None
        self._recovery_s: float | None = None
        self._amiss = 'the fault never happened' if self._fault.victims else ''
        self._given_up = False
        self._statuses: tuple[ChildStatus, ...] = ()

    def run(self) -> None:
        """Does it; for a thread of its own."""
        try:
            while not self._is_time():
                if self._over.wait(LOOK_INTERVAL_S):
                    return
            if self._fault.victims:
                time.sleep(IN_THE_MIDST_S)
                self._inject(self._model())
        except Exception as error:  # noqa: BLE001 - it belongs to the report of the case
            self._amiss = f'the fault failed: {error!r}'
        finally:
            self._done.set()

    def finish(self) -> None:
        """Waits until the stack is whole, or has had its time."""
        self._over.set()
        self._done.wait(RECOVERY_BOUND_S + DOWN_S)

    def report(self) -> dict[str, Any]:
        """What was seen."""
        return {
            'injected_at_ms': self._injected_at_ms,
            'recovery_s': self._recovery_s,
            'amiss': self._amiss,
            'given_up': self._given_up,
            'statuses': [str(status) for status in self._statuses],
        }

    def _inject(self, model: Any) -> None:
        before = {status.label: status.pid for status in model.status()}
        if self._fault.held_down:
            self._down.touch()
        self._injected_at_ms = time.time_ns() // 1_000_000
        since = time.monotonic()
        for number, label in enumerate(self._fault.victims):
            if number:
                time.sleep(SECOND_KILL_AFTER_S)
            pid = before[label]
            assert pid is not None
            os.kill(pid, self._fault.signal)
        if self._fault.held_down and self._fault.survivable:
            time.sleep(DOWN_S)
            self._down.unlink()
            since = time.monotonic()
        victims = {label: before[label] for label in self._fault.victims}
        while time.monotonic() - since < RECOVERY_BOUND_S:
            self._statuses = model.status()
            if not self._fault.survivable:
                if any(status.state == 'failed' for status in self._statuses):
                    self._given_up, self._amiss = True, ''
                    return
            else:
                self._amiss = not_whole(model, victims)
                if not self._amiss:
                    self._recovery_s = time.monotonic() - since
                    return
            time.sleep(LOOK_INTERVAL_S)
        self._amiss = self._amiss or 'it was not given up'


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process holds at a quiet moment."""

    descriptors: int
    threads: int


def held_by_this_process() -> Held:
    """The least that is seen for a while, so that probes under way do not count."""
    deadline = time.monotonic() + QUIET_S
    seen = []
    while time.monotonic() < deadline:
        seen.append(Held(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))))  # noqa: PTH208 - it holds one itself, each time
        time.sleep(LOOK_INTERVAL_S)
    return Held(min(s.descriptors for s in seen), min(s.threads for s in seen))


def kill_in_turn(model: Any, times: int) -> dict[str, Any]:
    """Kills each engine so many times, waits each time until the stack is whole.

    Returns:
      How many engines were started again, and what this process held before and after.

    Raises:
      RuntimeError: It was not whole again in time.
    """
    before = held_by_this_process()
    restarts = 0
    for _ in range(times):
        for label, pid in [(s.label, s.pid) for s in model.status() if 'engine' in s.label]:
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + RECOVERY_BOUND_S
            while amiss := not_whole(model, {label: pid}):
                if time.monotonic() > deadline:
                    raise RuntimeError(f'after restart {restarts} of an engine: {amiss}')
                time.sleep(LOOK_INTERVAL_S)
            restarts += 1
    after = held_by_this_process()
    return {
        'restarts_in_turn': restarts,
        'descriptors': [before.descriptors, after.descriptors],
        'threads': [before.threads, after.threads],
    }


def not_whole(model: Any, victims: Mapping[str, int | None]) -> str:
    """What is missing until every process serves and exactly the engines are routable."""
    statuses = model.status()
    for status in statuses:
        if status.state != 'serving':
            return f'{status.label} is {status.state}'
        if victims.get(status.label) == status.pid:
            return f'{status.label} was not replaced'
    engines = sum(status.label.startswith('engine') for status in statuses)
    routed = routable(runtime_of(model))
    return '' if routed == engines else f'{routed} of {engines} engines are routable'


def restarts_of_others(model: Any, victims: Sequence[str]) -> int:
    """How often what was not hit was started again; some of it shows only late in the job."""
    statuses = model.status() if model is not None else ()
    return sum(status.restarts for status in statuses if status.label not in victims)


def runtime_of(model: Any) -> Any:
    """What runs the servers, in this process."""
    return model._place._access._host.runtime  # noqa: SLF001 - the stack's own address and name


def routable(runtime: Any) -> int:
    """How many engines the frontend routes to."""
    stack = runtime._stack  # noqa: SLF001
    if stack is None:
        return 0
    return _probes.routed_engines(stack.addresses.frontend_port, stack.model_name, stack.namespace)
