"""When a child is started again, and what may be said of it; no process is needed."""

from __future__ import annotations

import itertools

import pytest

from apache_beam_vllm_dynamo._restart import (
    ChildState,
    ChildStatus,
    GiveUp,
    Restart,
    RestartPolicy,
    RestartTracker,
)
from apache_beam_vllm_dynamo._service import HELPER_RESTART_POLICY, RESTART_POLICY

POLICY = RestartPolicy(
    max_consecutive_failures=3, initial_backoff_s=1.0, max_backoff_s=3.0, stable_after_s=60.0
)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracker(clock: Clock) -> RestartTracker:
    return RestartTracker(POLICY, clock)


def test_delay_doubles_up_to_its_limit_and_then_it_gives_up(tracker: RestartTracker) -> None:
    """Three failures in a row are answered after 1, 2 and 3 s; the fourth ends it."""
    assert [tracker.failed() for _ in range(3)] == [Restart(1.0), Restart(2.0), Restart(3.0)]
    assert tracker.failed() == GiveUp('failed 4 times in a row, 3 allowed')
    assert tracker.restarts == 3


def test_a_child_that_was_stable_starts_a_new_row(tracker: RestartTracker, clock: Clock) -> None:
    """Up for exactly the stable time: its failure counts as the first again."""
    tracker.failed()
    tracker.failed()
    tracker.came_up()
    clock.now += 60.0
    assert tracker.failed() == Restart(1.0)
    assert tracker.consecutive_failures == 1
    assert tracker.restarts == 3


def test_a_child_that_came_up_but_not_for_long_continues_the_row(
    tracker: RestartTracker, clock: Clock
) -> None:
    """Ready and dead a moment too soon, again and again, does not restart for ever."""
    for expected in (Restart(1.0), Restart(2.0), Restart(3.0)):
        tracker.came_up()
        clock.now += 59.9
        assert tracker.failed() == expected
    tracker.came_up()
    clock.now += 59.9
    assert isinstance(tracker.failed(), GiveUp)


def test_only_time_spent_up_counts(tracker: RestartTracker, clock: Clock) -> None:
    """A slow start, or a long back-off, does not make a failing child stable."""
    tracker.came_up()
    tracker.failed()
    clock.now += 1000.0
    assert tracker.failed() == Restart(2.0)


def test_the_moment_of_the_failure_can_be_given(tracker: RestartTracker, clock: Clock) -> None:
    """A failure that is noticed late is judged by when it happened."""
    tracker.failed()
    tracker.came_up()
    clock.now += 100.0
    assert tracker.failed(now=1010.0) == Restart(2.0)


def test_no_restart_is_a_policy_too() -> None:
    """With 0 the first failure is the last."""
    tracker = RestartTracker(RestartPolicy(0, 1.0, 1.0, 60.0), Clock())
    assert tracker.failed() == GiveUp('failed 1 times in a row, 0 allowed')
    assert tracker.restarts == 0


def test_the_delay_does_not_overflow() -> None:
    """A policy that practically never gives up stays at its largest delay."""
    policy = RestartPolicy(10**9, 0.5, 30.0, 60.0)
    assert policy.backoff_s(1) == 0.5
    assert policy.backoff_s(10**9) == 30.0


@pytest.mark.parametrize(
    ('numbers', 'name'),
    [
        ((-1, 1.0, 1.0, 1.0), 'max_consecutive_failures'),
        ((1, -0.1, 1.0, 1.0), 'initial_backoff_s'),
        ((1, 2.0, 1.0, 1.0), 'max_backoff_s'),
        ((1, 1.0, 1.0, float('nan')), 'stable_after_s'),
    ],
)
def test_a_policy_that_cannot_work_is_refused_by_name(
    numbers: tuple[int, float, float, float], name: str
) -> None:
    """The message begins with the field that is wrong."""
    with pytest.raises(ValueError, match=f'^{name} must'):
        RestartPolicy(*numbers)


ALLOWED = {
    ('starting', 'serving'),
    ('starting', 'hung'),
    ('starting', 'restarting'),
    ('serving', 'hung'),
    ('serving', 'restarting'),
    ('hung', 'serving'),
    ('hung', 'restarting'),
    ('restarting', 'starting'),
    *((state, 'failed') for state in ('starting', 'serving', 'hung', 'restarting')),
    *((state, 'stopped') for state in ('starting', 'serving', 'hung', 'restarting', 'failed')),
}


@pytest.mark.parametrize(('before', 'after'), [*itertools.permutations(ChildState, 2)])
def test_transitions_are_exactly_the_allowed_ones(before: ChildState, after: ChildState) -> None:
    """A stopped child stays stopped, a failed one can only be stopped, and so on."""
    status = ChildStatus('etcd', before)
    if (before.value, after.value) in ALLOWED:
        assert status.to(after).state is after
    else:
        with pytest.raises(ValueError, match=f'etcd is {before} and cannot become {after}'):
            status.to(after)


def test_a_record_follows_a_child_through_its_life() -> None:
    """The pid goes with the process, the last error stays, each second start is counted."""
    status = ChildStatus('engine 1', devices=('0', '1')).to(ChildState.STARTING, pid=7)
    status = status.to(ChildState.SERVING)
    assert (status.pid, status.restarts, status.last_error) == (7, 0, None)
    status = status.to(ChildState.RESTARTING, error='killed by SIGKILL')
    assert (status.pid, status.restarts) == (None, 0)
    status = status.to(ChildState.STARTING, pid=8).to(ChildState.SERVING)
    assert status == ChildStatus(
        'engine 1', ChildState.SERVING, 8, ('0', '1'), 1, 'killed by SIGKILL'
    )
    assert status.to(ChildState.STOPPED).pid is None


def test_what_all_others_need_is_waited_for_longer_than_an_engine() -> None:
    def tries_for_s(policy: RestartPolicy) -> float:
        failures = range(1, policy.max_consecutive_failures + 1)
        return sum(policy.backoff_s(failure) for failure in failures)

    assert tries_for_s(RESTART_POLICY) == 15.5
    assert tries_for_s(HELPER_RESTART_POLICY) > 120
    # Once it is back, it is not waited for much longer.
    assert HELPER_RESTART_POLICY.max_backoff_s <= 5
