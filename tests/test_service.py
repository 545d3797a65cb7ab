"""The state machine of one service, with a clock that only the test moves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import pytest

from apache_beam_vllm_dynamo import RuntimeFailedError, StartError, _service
from apache_beam_vllm_dynamo._probes import Reply
from apache_beam_vllm_dynamo._process import ChildSpec, ExitStatus
from apache_beam_vllm_dynamo._service import (
    GONE_BOUND_S,
    LIVENESS_TIMEOUT_S,
    NEED_GRACE_S,
    RESTART_POLICY,
    SILENT_PROBES,
    SILENT_PROBES_OF_FROZEN,
    STOPPED_BOUND_S,
    UNWELL_BOUND_S,
    Service,
    ServiceSpec,
)

T = TypeVar('T')

SILENT = Reply(None, problem='timed out')
REFUSED = Reply(None, problem='connection refused')
UNWELL = Reply(503)
WELL = None
OUT_OF_MEMORY = 'torch.OutOfMemoryError: CUDA out of memory.'
PORT_TAKEN = 'OSError: address already in use'
CRASH = ExitStatus(-9)


class FakeProcess:
    """Stands in for a child: it lives until the test says otherwise."""

    made: list[FakeProcess]
    start_error: StartError | None = None

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.exit: ExitStatus | None = None
        self.killed = ''
        self.lingers: tuple[int, ...] = ()
        self.log: list[str] = []
        self.pid = 100 + len(self.made)
        self.made.append(self)

    def start(self, hold_fds: Sequence[int]) -> None:
        if FakeProcess.start_error is not None:
            raise FakeProcess.start_error

    def poll(self) -> ExitStatus | None:
        return self.exit

    def kill(self, reason: str) -> bool:
        self.killed = reason
        self.exit = CRASH
        return not self.lingers

    def left(self) -> tuple[int, ...]:
        return self.lingers

    def log_tail(self, n: int) -> tuple[str, ...]:
        return tuple(self.log[-n:])


class AtOnce:
    """Runs each probe when it is asked for; a silent one costs its time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, ask: Callable[[float], T], timeout_s: float) -> Future[T]:
        future: Future[T] = Future()
        found = ask(timeout_s)
        if found is SILENT:
            self._world.now += timeout_s
        future.set_result(found)
        return future


class World:
    """One service with everything around it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.answer: Reply | None = WELL
        self.cpu_time = 0
        self.stopped = False
        self.needed = Needed()
        self.moved: list[bool] = []
        self.service = Service(
            self.spec(), [self.needed], (), self.renew,
            lambda: self.now, lambda _: self.cpu_time, lambda _: self.stopped,
        )  # fmt: skip
        self.probes = AtOnce(self)
        self.service.launch()

    def spec(self, port: int = 0) -> ServiceSpec:
        return ServiceSpec(
            'engine 1 of 2', ('engine', str(port)), {}, self.probe, 5.0, 100.0, ('0',)
        )

    def renew(self, taken: bool) -> ServiceSpec:  # noqa: FBT001
        self.moved.append(taken)
        return self.spec(len(self.moved))

    def probe(self, timeout_s: float) -> Reply | None:
        self.cpu_time += 1 if self.busy else 0
        return self.answer

    busy = True

    @property
    def process(self) -> FakeProcess:
        return FakeProcess.made[-1]

    @property
    def state(self) -> str:
        return self.service.status.state

    def pass_time(self, seconds: float, step_s: float = 0.1) -> None:
        """Ticks for as long, unless something is raised."""
        end = self.now + seconds
        while self.now < end:
            self.service.tick(self.probes)
            self.now += step_s

    def until(self, state: str, bound_s: float = 200.0) -> float:
        """Ticks until the state is reached; how long that took, in seconds."""
        began = self.now
        while self.state != state:
            assert self.now - began < bound_s, f'still {self.state}'
            self.service.tick(self.probes)
            self.now += 0.1
        return self.now - began

    def crash_again(self, times: int) -> None:
        """So many crashes, each as soon as it is started again."""
        for _ in range(times):
            self.process.exit = CRASH
            self.until('restarting')
            self.until('starting')

    def crash_always(self, state: str, log: str) -> None:
        """Has each process crash as soon as it is in that state."""
        for _ in range(50):
            self.until(state)
            self.process.log.append(log)
            self.process.exit = CRASH
            self.pass_time(0.2)


class Needed:
    """What the service needs."""

    serves = True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(FakeProcess, 'made', [], raising=False)
    monkeypatch.setattr(FakeProcess, 'start_error', None)
    monkeypatch.setattr(_service, 'ManagedProcess', FakeProcess)
    return World()


@pytest.fixture
def serving(world: World) -> World:
    world.until('serving')
    return world


def test_a_service_serves_once_its_probe_is_content(world: World) -> None:
    world.answer = UNWELL
    world.pass_time(5)
    assert world.state == 'starting'
    world.answer = WELL
    world.until('serving')
    assert world.service.status.pid == world.process.pid
    assert world.service.status.devices == ('0',)


def test_what_ends_is_started_again_after_a_pause(serving: World) -> None:
    serving.process.exit = CRASH
    serving.until('restarting')
    status = serving.service.status
    assert (status.pid, status.last_error) == (None, 'ended: killed by SIGKILL')
    assert serving.until('starting') == pytest.approx(RESTART_POLICY.initial_backoff_s, abs=0.2)
    serving.until('serving')
    assert len(FakeProcess.made) == 2
    assert serving.service.status.restarts == 1


def test_failures_in_a_row_are_limited_and_the_end_names_reason_and_log(serving: World) -> None:
    with pytest.raises(RuntimeFailedError) as raised:
        serving.crash_always('serving', 'it hurts')
    assert len(FakeProcess.made) == 1 + RESTART_POLICY.max_consecutive_failures
    assert 'engine 1 of 2 ended: killed by SIGKILL; failed 6 times in a row' in str(raised.value)
    assert raised.value.log_tail == ('it hurts',)
    assert serving.state == 'failed'


def test_a_stable_time_ends_the_row(serving: World) -> None:
    for _ in range(3 * RESTART_POLICY.max_consecutive_failures):
        serving.until('serving')
        serving.pass_time(RESTART_POLICY.stable_after_s + 1)
        serving.process.exit = CRASH
        serving.until('starting')


def test_a_server_that_stays_silent_is_killed_and_replaced(serving: World) -> None:
    first = serving.process
    serving.answer = SILENT
    took_s = serving.until('restarting')
    assert took_s == pytest.approx(SILENT_PROBES * LIVENESS_TIMEOUT_S + 1, abs=2)
    assert 'does not answer' in first.killed
    serving.answer = WELL
    serving.until('serving')
    assert serving.process is not first


def test_one_that_uses_no_cpu_time_is_given_less(serving: World) -> None:
    serving.busy = False
    serving.answer = SILENT
    took_s = serving.until('restarting')
    assert took_s == pytest.approx(SILENT_PROBES_OF_FROZEN * LIVENESS_TIMEOUT_S + 1, abs=1)


def test_one_that_a_signal_has_stopped_is_replaced_without_a_probe(serving: World) -> None:
    serving.stopped = True
    assert serving.until('restarting') == pytest.approx(STOPPED_BOUND_S, abs=0.25)
    assert 'stopped by a signal' in serving.process.killed
    serving.stopped = False
    serving.until('serving')
    assert serving.service.status.restarts == 1


def test_one_that_goes_on_at_once_was_only_looked_at(serving: World) -> None:
    for _ in range(3):
        serving.stopped = True
        serving.pass_time(STOPPED_BOUND_S - 0.1)
        serving.stopped = False
        serving.pass_time(0.2)
    assert serving.state == 'serving'


def test_one_that_refuses_connections_is_given_as_much_time_as_a_silent_one(
    serving: World,
) -> None:
    """It may be ending by itself, with requests to finish."""
    serving.busy = False
    serving.answer = REFUSED
    took_s = serving.until('restarting')
    assert took_s >= (SILENT_PROBES_OF_FROZEN - 1) * LIVENESS_TIMEOUT_S
    serving.answer = WELL
    serving.until('serving')
    serving.busy = True
    serving.answer = REFUSED
    assert serving.until('restarting') >= (SILENT_PROBES - 1) * LIVENESS_TIMEOUT_S


def test_the_next_start_waits_until_nothing_is_left_of_the_last_process(serving: World) -> None:
    serving.process.lingers = (7, 8)
    serving.answer = SILENT
    serving.until('restarting')
    serving.pass_time(GONE_BOUND_S - 1)
    assert serving.state == 'restarting'
    assert len(FakeProcess.made) == 1
    serving.process.lingers = ()
    serving.answer = WELL
    serving.until('serving', bound_s=1)


def test_what_kill_does_not_end_is_waited_for_with_an_end_that_names_it(serving: World) -> None:
    for _ in range(2):  # each time for as long
        serving.process.lingers = (7, 8)
        serving.process.exit = CRASH
        serving.until('restarting')
        serving.pass_time(GONE_BOUND_S - 1)
        serving.process.lingers = ()
        serving.until('serving')
    serving.process.lingers = (7, 8)
    serving.process.exit = CRASH
    with pytest.raises(RuntimeFailedError, match=r'that KILL does not end: 7, 8.*reset the GPU'):
        serving.pass_time(GONE_BOUND_S + 2)
    assert serving.state == 'failed'
    assert len(FakeProcess.made) == 3


def test_single_silent_probes_are_forgiven(serving: World) -> None:
    for _ in range(20):
        serving.answer = SILENT
        serving.pass_time((SILENT_PROBES - 2) * LIVENESS_TIMEOUT_S)
        serving.answer = WELL
        serving.pass_time(2)
    assert serving.state == 'serving'
    assert len(FakeProcess.made) == 1


def test_a_server_that_says_for_long_that_it_is_unwell_is_replaced(serving: World) -> None:
    serving.answer = UNWELL
    serving.pass_time(UNWELL_BOUND_S - 5)
    assert serving.state == 'serving'
    serving.until('restarting', bound_s=10)
    assert 'not well' in FakeProcess.made[0].killed


def test_a_restart_that_does_not_come_to_serve_is_killed_at_its_bound(serving: World) -> None:
    serving.process.exit = CRASH
    serving.until('starting')
    serving.answer = UNWELL
    assert serving.until('restarting') == pytest.approx(100, abs=1)


def test_a_deterministic_failure_of_the_first_start_is_not_repeated(world: World) -> None:
    world.process.log.append(OUT_OF_MEMORY)
    world.process.exit = ExitStatus(1)
    with pytest.raises(RuntimeFailedError, match=r'out of GPU memory.*max-num-seqs'):
        world.pass_time(1)
    assert len(FakeProcess.made) == 1


def test_what_served_before_gets_one_more_try_at_a_deterministic_failure(serving: World) -> None:
    serving.answer = UNWELL
    serving.process.exit = CRASH
    with pytest.raises(RuntimeFailedError, match='out of GPU memory'):
        serving.crash_always('starting', OUT_OF_MEMORY)
    assert len(FakeProcess.made) == 3


def test_nothing_is_started_while_what_it_needs_is_away(serving: World) -> None:
    serving.needed.serves = False
    serving.process.exit = CRASH
    serving.until('restarting')
    serving.pass_time(300)
    assert serving.state == 'restarting'
    serving.needed.serves = True
    serving.until('serving', bound_s=1)


def test_failures_for_want_of_what_it_needs_are_not_counted(serving: World) -> None:
    for _ in range(3 * RESTART_POLICY.max_consecutive_failures):
        serving.needed.serves = False
        serving.process.exit = ExitStatus(0)
        serving.until('restarting')
        serving.needed.serves = True
        serving.until('serving')


@pytest.mark.parametrize('outlives', [False, True])
def test_a_port_taken_by_others_moves_the_next_start(serving: World, outlives: bool) -> None:  # noqa: FBT001
    serving.answer = UNWELL
    serving.process.exit = CRASH
    serving.until('starting')
    assert serving.moved == [False]
    serving.process.log.append(PORT_TAKEN)
    if not outlives:
        serving.process.exit = ExitStatus(1)
    serving.until('restarting', bound_s=5)
    serving.until('starting')
    assert serving.moved == [False, True]
    assert serving.process.spec.argv == ('engine', '2')
    serving.answer = WELL
    serving.until('serving')


def test_a_start_that_fails_at_once_counts_as_a_failure(serving: World) -> None:
    FakeProcess.start_error = StartError('no process could be made')
    serving.process.exit = CRASH
    with pytest.raises(RuntimeFailedError, match='no process could be made; failed 6 times'):
        serving.pass_time(300)


def test_tries_that_fail_alike_are_told_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        world.crash_again(3)
        world.until('serving')
        world.process.exit = CRASH
        world.until('restarting')
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    died = ('WARNING', f'engine 1 of 2: restarting (ended: {CRASH})')
    assert said == [
        died,
        ('INFO', 'engine 1 of 2: starting'),
        ('INFO', 'engine 1 of 2: serving'),
        died,
    ]


def test_what_ends_soon_after_its_need_is_back_is_not_to_blame_either(serving: World) -> None:
    """A lease that was lost meanwhile ends it when etcd serves again."""
    serving.needed.serves = False
    serving.pass_time(1)
    serving.needed.serves = True
    serving.crash_again(RESTART_POLICY.max_consecutive_failures + 2)
    serving.pass_time(NEED_GRACE_S)
    with pytest.raises(RuntimeFailedError):
        serving.crash_again(RESTART_POLICY.max_consecutive_failures + 1)


def test_each_change_of_state_is_logged_once(
    serving: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        serving.answer = SILENT
        serving.until('restarting')
        serving.answer = WELL
        serving.until('serving')
        serving.pass_time(30)
    said = [(r.levelname, r.getMessage().partition(' (')[0]) for r in caplog.records]
    assert said == [
        ('WARNING', 'engine 1 of 2: hung'),
        ('INFO', 'engine 1 of 2: starting'),
        ('INFO', 'engine 1 of 2: serving'),
    ]
