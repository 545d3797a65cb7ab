"""When a child is started again, and when to give up; and what may be said of one.

Pure: nothing here starts, stops or sleeps, and the time comes from a clock that is passed in.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """How often, and how soon.

    Attributes:
      max_consecutive_failures: How many failures in a row are answered with a restart; the
        next one gives up. 0 never restarts.
      initial_backoff_s: The delay before the first restart in a row, in seconds; it doubles
        with each further one.
      max_backoff_s: What it never exceeds, in seconds.
      stable_after_s: A child that was up for this long, in seconds, has ended the row: its
        next failure is counted as the first again.

    Raises:
      ValueError: A number is negative, or the largest back-off is below the first.
    """

    max_consecutive_failures: int
    initial_backoff_s: float
    max_backoff_s: float
    stable_after_s: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value >= 0:  # also refuses NaN
                raise ValueError(f'{field.name} must not be negative, not {value!r}')
        if self.max_backoff_s < self.initial_backoff_s:
            raise ValueError(
                f'max_backoff_s must be at least initial_backoff_s ({self.initial_backoff_s!r}), '
                f'not {self.max_backoff_s!r}'
            )

    def backoff_s(self, failures: int) -> float:
        """The delay before the restart that answers failure number `failures` in a row."""
        doublings = min(failures - 1, 64)  # further ones would only overflow
        return min(self.initial_backoff_s * 2.0**doublings, self.max_backoff_s)


@dataclasses.dataclass(frozen=True)
class Restart:
    """Start it again, `delay_s` seconds after the failure."""

    delay_s: float


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """Leave it; `reason` says why, in a sentence without a full stop."""

    reason: str


Decision = Restart | GiveUp


class RestartTracker:
    """Applies a policy to the life of one child.

    Args:
      policy: The policy.
      clock: Seconds that only ever grow.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._up_since: float | None = None
        self.consecutive_failures = 0
        self.restarts = 0

    def came_up(self) -> None:
        """Notes that the child does its work from now on."""
        self._up_since = self._clock()

    def failed(self, now: float | None = None) -> Decision:
        """Notes that the child failed, at start or later, and says what to do about it.

        Args:
          now: When it failed, by the clock; now, if not given.
        """
        now = self._clock() if now is None else now
        if self._up_since is not None and now - self._up_since >= self._policy.stable_after_s:
            self.consecutive_failures = 0
        self._up_since = None
        self.consecutive_failures += 1
        if self.consecutive_failures > self._policy.max_consecutive_failures:
            allowed = self._policy.max_consecutive_failures
            return GiveUp(f'failed {self.consecutive_failures} times in a row, {allowed} allowed')
        self.restarts += 1
        return Restart(self._policy.backoff_s(self.consecutive_failures))

    def excused(self) -> Restart:
        """Notes a failure that something else is to blame for: it is not counted.

        A child that has lost what it needs would otherwise use up its tries on that.
        """
        self._up_since = None
        self.restarts += 1
        return Restart(self._policy.initial_backoff_s)


class ChildState(enum.StrEnum):
    """Where a child is in its life."""

    STARTING = 'starting'
    SERVING = 'serving'
    HUNG = 'hung'  # alive, but its probes fail
    RESTARTING = 'restarting'  # ended; the next start waits for its back-off
    FAILED = 'failed'  # given up
    STOPPED = 'stopped'


_ENDS = frozenset({ChildState.FAILED, ChildState.STOPPED})
_NEXT: dict[ChildState, frozenset[ChildState]] = {
    ChildState.STARTING: _ENDS | {ChildState.SERVING, ChildState.HUNG, ChildState.RESTARTING},
    ChildState.SERVING: _ENDS | {ChildState.HUNG, ChildState.RESTARTING},
    ChildState.HUNG: _ENDS | {ChildState.SERVING, ChildState.RESTARTING},
    ChildState.RESTARTING: _ENDS | {ChildState.STARTING},
    ChildState.FAILED: frozenset({ChildState.STOPPED}),
    ChildState.STOPPED: frozenset(),
}
_WITH_PROCESS = frozenset({ChildState.STARTING, ChildState.SERVING, ChildState.HUNG})


@dataclasses.dataclass(frozen=True)
class ChildStatus:
    """What is known of one child at one moment.

    Attributes:
      label: Which child, e.g. ``"engine 1 of 2"``.
      state: Where it is in its life.
      pid: The process id of its command, or ``None`` while it has no process.
      devices: What it is pinned to.
      restarts: How often it was started again.
      last_error: Its last failure, or ``None``.
    """

    label: str
    state: ChildState = ChildState.STARTING
    pid: int | None = None
    devices: tuple[str, ...] = ()
    restarts: int = 0
    last_error: str | None = None

    def to(
        self, state: ChildState, *, pid: int | None = None, error: str | None = None
    ) -> ChildStatus:
        """The record after a change of state; the same state again is no change.

        Args:
          state: The next state. Each start after ``RESTARTING`` counts as a restart.
          pid: The new process id; else it stays, or goes with the process.
          error: What failed; else the last failure stays.

        Raises:
          ValueError: There is no way from this state to `state`.
        """
        if state is not self.state and state not in _NEXT[self.state]:
            raise ValueError(f'{self.label} is {self.state} and cannot become {state}')
        again = self.state is ChildState.RESTARTING and state is ChildState.STARTING
        return dataclasses.replace(
            self,
            state=state,
            pid=(pid or self.pid) if state in _WITH_PROCESS else None,
            restarts=self.restarts + again,
            last_error=error or self.last_error,
        )
