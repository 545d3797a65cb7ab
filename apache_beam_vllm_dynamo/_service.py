"""One place in a stack of servers, filled by one process after another.

A :class:`Service` turns what can be seen of its process (it lives, it has ended, its probe
answers or stays silent) into a state and into what to do next. It knows neither Dynamo nor
Beam; what runs, and how it is asked whether it serves, comes in its :class:`ServiceSpec`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from apache_beam_vllm_dynamo._diagnosis import UNKNOWN, Diagnosis, diagnose
from apache_beam_vllm_dynamo._marker import cpu_ticks, is_stopped
from apache_beam_vllm_dynamo._process import ChildSpec, ManagedProcess
from apache_beam_vllm_dynamo._restart import (
    ChildState,
    ChildStatus,
    Decision,
    GiveUp,
    RestartPolicy,
    RestartTracker,
)
from apache_beam_vllm_dynamo.errors import ChildExitedError, RuntimeFailedError, StartError

T = TypeVar('T')

_LOGGER = logging.getLogger(__name__)

PROBE_INTERVAL_S = 1.0  # of a service that serves; a start is probed at every look
LIVENESS_TIMEOUT_S = 2.0
# Together 10 s: a hung engine delays its requests by that, and a server starved of CPU for shorter
# must not lose its cache and its requests for it.
SILENT_PROBES = 5
# One that has used no CPU time at all meanwhile is not starved: it is in a deadlock.
SILENT_PROBES_OF_FROZEN = 2
# One that a signal has stopped will not answer, which needs no probe to be known; who is stopped to
# be looked at, and goes on at once, is left alone.
STOPPED_BOUND_S = 0.4
ADDRESS_TAKEN = 'address in use'
UNWELL_BOUND_S = 60.0  # of a server that answers, but says that it does not serve
# What KILL does not end hangs in a driver, which either comes back within seconds or not at all.
GONE_BOUND_S = 60.0
# Who has lost a lease while etcd was away may end when it is back: within a lease, and the end.
NEED_GRACE_S = 10.0
LOG_LOOK_INTERVAL_S = 1.0  # of a start: to search the end of a log takes milliseconds

RESTART_POLICY = RestartPolicy(
    max_consecutive_failures=5,  # with the back-off, 15 s of trying beside the starts
    initial_backoff_s=0.5,
    max_backoff_s=15.0,
    stable_after_s=60.0,
)
# Of what all others need and which has no settings that could be wrong: it is waited for.
HELPER_RESTART_POLICY = RestartPolicy(
    max_consecutive_failures=62,  # two minutes
    initial_backoff_s=0.5,
    max_backoff_s=2.0,  # all else waits for it
    stable_after_s=60.0,
)


class Answer(Protocol):
    """What a probe found amiss."""

    @property
    def status(self) -> int | None:
        """The HTTP status, or ``None`` for silence."""


class Probes(Protocol):
    """What runs probes elsewhere."""

    def submit(self, ask: Callable[[float], T], timeout_s: float) -> Future[T]:
        """Asks soon, and gives the answer later."""


class Need(Protocol):
    """What a service cannot be started without."""

    @property
    def serves(self) -> bool:
        """Whether it is there at present."""


@dataclasses.dataclass(frozen=True)
class ServiceSpec:
    """What fills the place.

    Attributes:
      label: What messages call it, e.g. ``"engine 1 of 2"``.
      argv: The command line.
      env: The whole environment; kept out of ``repr``.
      probe: Asks whether it serves, waiting at most so many seconds; ``None`` when it does,
        else what it answered. It is called on threads of the runtime.
      liveness: A lighter question for while it serves, where silence is what matters;
        ``probe`` itself where there is none.
      stop_grace_s: How long it may take to end by itself, in seconds.
      start_bound_s: How long a restart may take until it serves, in seconds.
      unwell_bound_s: How long it may answer that it does not serve, in seconds, once it did.
      devices: What it is pinned to.
      restart_policy: How often it is started again.
    """

    label: str
    argv: tuple[str, ...]
    env: dict[str, str] = dataclasses.field(repr=False)
    probe: Callable[[float], Answer | None]
    stop_grace_s: float
    start_bound_s: float
    devices: tuple[str, ...] = ()
    restart_policy: RestartPolicy = RESTART_POLICY
    unwell_bound_s: float = UNWELL_BOUND_S
    liveness: Callable[[float], Answer | None] | None = None


class Service:
    """The place, its present process and its history.

    Not thread-safe: one thread at a time drives it. :attr:`status` may be read from any.

    Args:
      spec: What fills the place.
      needs: Services that must serve before this one is started again.
      hold_fds: Descriptors held open until its processes are gone, see ``ManagedProcess``.
      renew: Gives the spec of the next start; its argument is whether an address of the last
        one was taken by others. Without it each start is like the first.
      clock: Seconds that only ever grow.
      cpu_time: How much CPU time a process has used, in any unit; ``None`` if it has ended.
      stopped: Whether a process is stopped by a signal.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        needs: Sequence[Need] = (),
        hold_fds: Sequence[int] = (),
        renew: Callable[[bool], ServiceSpec] | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_time: Callable[[int], int | None] = cpu_ticks,
        stopped: Callable[[int], bool] = is_stopped,
    ) -> None:
        self.spec = spec
        self._renew = renew
        self.status = ChildStatus(spec.label, devices=spec.devices)
        self.process: ManagedProcess | None = None
        self._needs = tuple(needs)
        self._without_needs_at = -math.inf
        self._hold_fds = tuple(hold_fds)
        self._clock = clock
        self._cpu_time = cpu_time
        self._cpu_time_before: int | None = None
        self._stopped = stopped
        self._stopped_since: float | None = None
        self._tracker = RestartTracker(spec.restart_policy, clock)
        self._restart_at = 0.0
        self._lingers_since: float | None = None
        self._started_at = 0.0
        self._next_probe_at = 0.0
        self._silent_probes = 0
        self._asked_at = 0.0
        self._well_at = 0.0
        self._served_before = False
        self._last_cause = ''  # of the start that failed last
        self._said = ''  # of what went wrong since it served
        self._repeated = ''  # what was said before
        self._next_log_look_at = 0.0
        self._probing: Future[Answer | None] | None = None

    @property
    def serves(self) -> bool:
        """Whether it does its work, as far as is known."""
        return self.status.state is ChildState.SERVING

    def launch(self) -> None:
        """Starts a process in the empty place.

        Raises:
          StartError: It could not be started.
        """
        spec = self.spec
        child = ChildSpec(
            spec.label,
            spec.argv,
            spec.env,
            stop_grace_s=spec.stop_grace_s,
        )
        self.process = ManagedProcess(child)
        self._started_at = self._clock()
        self._silent_probes = 0
        self._stopped_since = None
        self._probing = None
        _LOGGER.debug('starting %s: %s', spec.label, spec.argv)
        self.process.start(self._hold_fds)
        self._become(ChildState.STARTING, pid=self.process.pid)

    def check_alive(self) -> None:
        """Raises what the process's end means while it is needed.

        Raises:
          ChildExitedError: It has ended.
        """
        exit_status = self.process.poll() if self.process is not None else None
        if exit_status is not None:
            tail = self.log_tail()
            raise ChildExitedError(self.spec.label, str(exit_status), tail, diagnose(tail).hint)

    def log_tail(self, lines: int = 50) -> tuple[str, ...]:
        """The last lines that its present process wrote."""
        return self.process.log_tail(lines) if self.process is not None else ()

    def lost_its_port(self) -> bool:
        """Whether it cannot listen because others took its port; looks at most once a second.

        An engine whose health port is taken says so, lives on and never becomes healthy.
        """
        return self._look_at_log().retry == 'other_addresses'

    def is_hopeless(self) -> bool:
        """Whether its log says that it will never serve; looks at most once a second."""
        return self._look_at_log().lives_on

    def _look_at_log(self) -> Diagnosis:
        now = self._clock()
        if now < self._next_log_look_at:
            return UNKNOWN
        self._next_log_look_at = now + LOG_LOOK_INTERVAL_S
        return diagnose(self.log_tail())

    def came_up(self) -> None:
        """Notes that it serves from now on."""
        self._tracker.came_up()
        self._served_before = True
        self._last_cause = ''
        self._well_at = self._clock()
        self._become(ChildState.SERVING)

    def tick(self, probes: Probes) -> None:
        """Looks at the process once and does what is due; quick, apart from a kill.

        Args:
          probes: Runs the probes, so that a silent server does not delay the look at others.

        Raises:
          RuntimeFailedError: It failed, and starting it again is given up.
        """
        self._look_at_needs()
        state = self.status.state
        if state is ChildState.RESTARTING:
            is_gone = self._predecessor_is_gone()
            if is_gone and self._clock() >= self._restart_at and self._has_needs():
                self._start_again()
        elif state in (ChildState.STARTING, ChildState.SERVING):
            exit_status = self.process.poll() if self.process is not None else None
            if exit_status is not None:
                self._failed(f'ended: {exit_status}', starting=state is ChildState.STARTING)
            elif self._stopped_for_s() > STOPPED_BOUND_S:
                self._kill_hung('is stopped by a signal')
            else:
                self._look_at_probe(probes)

    def replace(self, problem: str) -> None:
        """Kills what is there, which looks well from near, and starts it again.

        Args:
          problem: What is wrong with it.

        Raises:
          RuntimeFailedError: Starting it again is given up.
        """
        self._kill_hung(problem)

    def stopped(self) -> None:
        """Notes that it was stopped on purpose."""
        self._become(ChildState.STOPPED)

    def _look_at_needs(self) -> None:
        if not self._has_needs():
            self._without_needs_at = self._clock()

    def _has_needs(self) -> bool:
        return all(need.serves for need in self._needs)

    def _predecessor_is_gone(self) -> bool:
        """Whether nothing is left of the last process, which would share the device."""
        left = self.process.left() if self.process is not None else ()
        if not left:
            self._lingers_since = None
            return True
        now = self._clock()
        if self._lingers_since is None:
            self._lingers_since = now
        if now - self._lingers_since > GONE_BOUND_S:
            pids = ', '.join(map(str, left))
            self._become(ChildState.FAILED, error=f'still there after KILL: {pids}')
            raise RuntimeFailedError(
                f'{self.spec.label} has processes that KILL does not end: {pids}. They may hang in '
                'the GPU driver and still have the memory that the next start needs; reset the '
                'GPU, or restart the machine.',
                self.log_tail(),
            )
        return False

    def _start_again(self) -> None:
        try:
            if self._renew is not None:
                self.spec = self._renew(self._last_cause == ADDRESS_TAKEN)
            self.launch()
        except StartError as error:
            self._become(ChildState.STARTING)
            self._failed(str(error), starting=True)

    def _look_at_probe(self, probes: Probes) -> None:
        starting = self.status.state is ChildState.STARTING
        if self._probing is None:
            if self._clock() >= self._next_probe_at:
                ask = self.spec.probe if starting else self.spec.liveness or self.spec.probe
                if not self._silent_probes:
                    self._cpu_time_before = self._cpu_time_used()
                self._asked_at = self._clock()
                self._probing = probes.submit(ask, LIVENESS_TIMEOUT_S)
            return
        if not self._probing.done():
            return
        found, self._probing = self._probing.result(), None
        self._next_probe_at = self._clock() + (0.0 if starting else PROBE_INTERVAL_S)
        if found is None:
            self._silent_probes = 0
            self._well_at = self._clock()
            if starting:
                self.came_up()
        elif starting:
            self._look_at_start(found)
        else:
            self._look_at_answer(found)

    def _look_at_answer(self, found: Answer) -> None:
        if found.status is not None:
            self._silent_probes = 0
            bound_s = self.spec.unwell_bound_s
            if self._clock() - self._well_at > bound_s:
                self._kill_hung(f'says for {bound_s:.0f} s that it is not well: {found}')
            return
        self._silent_probes += 1
        # A refused connection takes no time, and may mean that it is about to end by itself.
        self._next_probe_at = self._asked_at + LIVENESS_TIMEOUT_S
        frozen = self._cpu_time_used() == self._cpu_time_before is not None
        if self._silent_probes >= (SILENT_PROBES_OF_FROZEN if frozen else SILENT_PROBES):
            self._kill_hung(f'does not answer: {found}')

    def _cpu_time_used(self) -> int | None:
        pid = self.process.pid if self.process is not None else None
        return self._cpu_time(pid) if pid is not None else None

    def _stopped_for_s(self) -> float:
        pid = self.process.pid if self.process is not None else None
        if pid is None or not self._stopped(pid):
            self._stopped_since = None
            return 0.0
        now = self._clock()
        if self._stopped_since is None:
            self._stopped_since = now
        return now - self._stopped_since

    def _look_at_start(self, found: Answer) -> None:
        if self._clock() - self._started_at > self.spec.start_bound_s:
            self._kill_hung(f'did not serve within {self.spec.start_bound_s:.0f} s: {found}')
        elif self.lost_its_port():
            self._kill_hung('could not listen on its port')

    def _kill_hung(self, problem: str) -> None:
        assert self.process is not None
        starting = self.status.state is ChildState.STARTING
        self._become(ChildState.HUNG, error=problem)
        self.process.kill(problem)
        self._failed(problem, starting=starting)

    def _failed(self, problem: str, *, starting: bool) -> None:
        tail = self.log_tail()
        diagnosis = diagnose(tail)
        self._look_at_needs()
        if self._clock() - self._without_needs_at < NEED_GRACE_S:
            decision: Decision = self._tracker.excused()
        else:
            decision = self._tracker.failed()
        # What served before worked with these settings, so that its end is a crash whatever its
        # log says, and a cause of its next start may still pass, but not the same one twice.
        hopeless = (
            starting
            and diagnosis.retry == 'never'
            and (not self._served_before or self._last_cause == diagnosis.cause)
        )
        self._last_cause = diagnosis.cause if starting else ''
        if hopeless or isinstance(decision, GiveUp):
            reason = f'{self.spec.label} {problem}'
            if isinstance(decision, GiveUp):
                reason += f'; {decision.reason}'
            elif diagnosis.cause:
                reason += f' ({diagnosis.cause})'
            if diagnosis.hint:
                reason += f'. {diagnosis.hint}'
            self._become(ChildState.FAILED, error=problem)
            raise RuntimeFailedError(f'{reason.rstrip(".")}.', tail)
        self._restart_at = self._clock() + decision.delay_s
        self._become(ChildState.RESTARTING, error=problem)

    def _become(self, state: ChildState, *, pid: int | None = None, error: str = '') -> None:
        before, self.status = self.status, self.status.to(state, pid=pid, error=error or None)
        if before.state is state:
            return
        if state is ChildState.SERVING:
            self._said = self._repeated = ''
        elif error and before.state is not ChildState.HUNG:
            self._repeated = error if error == self._said else ''
            self._said = error
        level = self._level(before.state)
        _LOGGER.log(level, '%s: %s%s', self.spec.label, state, f' ({error})' if error else '')

    def _level(self, before: ChildState) -> int:
        state = self.status.state
        if state is ChildState.FAILED:
            return logging.ERROR
        if self._repeated or before is ChildState.HUNG:
            return logging.DEBUG  # it was said before
        if state in (ChildState.HUNG, ChildState.RESTARTING):
            return logging.WARNING
        return logging.INFO if self.status.restarts else logging.DEBUG
