"""Engines that serve and that the frontend does not know, with a clock that only the test moves."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from apache_beam_vllm_dynamo._routing import UNROUTED_BOUND_S, RoutingWatch, listening_ports

T = TypeVar('T')


class FakeService:
    """As much of a service as the watch looks at."""

    def __init__(self, label: str, pid: int) -> None:
        self.spec = SimpleNamespace(label=label)
        self.status = SimpleNamespace(pid=pid)
        self.serves = True
        self.replaced: list[str] = []

    def replace(self, problem: str) -> None:
        self.replaced.append(problem)


class AtOnce:
    """Asks when it is told to."""

    def submit(self, ask: Callable[[float], T], timeout_s: float) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(ask(timeout_s))
        return future


class World:
    """A frontend and two engines, which listen on the ports 1 and 2."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.frontend = FakeService('frontend', 10)
        self.engines = [FakeService('engine 1 of 2', 1), FakeService('engine 2 of 2', 2)]
        self.routed: frozenset[int] | None = frozenset({1, 2})
        self.unreadable: set[int] = set()
        frontend: Any = self.frontend
        engines: Any = self.engines
        self.watch = RoutingWatch(
            frontend,
            engines,
            lambda _: self.routed,
            lambda pid: frozenset() if pid in self.unreadable else frozenset({pid}),
            lambda: self.now,
        )

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.watch.tick(AtOnce())
            self.now += 0.1

    @property
    def replaced(self) -> list[str]:
        services = (self.frontend, *self.engines)
        return [service.spec.label for service in services for _ in service.replaced]


@pytest.fixture
def world() -> World:
    return World()


def test_a_stack_in_order_is_left_alone(world: World) -> None:
    world.pass_time(100)
    assert world.replaced == []


def test_first_the_frontend_is_replaced_and_then_the_engine(world: World) -> None:
    world.routed = frozenset({1})
    world.pass_time(UNROUTED_BOUND_S - 1)
    assert world.replaced == []
    world.pass_time(5)
    assert world.replaced == ['frontend']
    world.pass_time(UNROUTED_BOUND_S + 5)
    assert world.replaced == ['frontend', 'engine 2 of 2']


def test_an_engine_that_the_new_frontend_knows_is_left_alone(world: World) -> None:
    world.routed = frozenset({1})
    world.pass_time(UNROUTED_BOUND_S + 4)
    world.routed = frozenset({1, 2})
    world.pass_time(100)
    assert world.replaced == ['frontend']


def test_a_gap_is_forgiven(world: World) -> None:
    for _ in range(5):
        world.routed = frozenset()
        world.pass_time(UNROUTED_BOUND_S - 4)
        world.routed = frozenset({1, 2})
        world.pass_time(4)
    assert world.replaced == []


def test_what_does_not_serve_is_somebody_elses_business(world: World) -> None:
    world.routed = frozenset({1})
    world.engines[1].serves = False
    world.pass_time(100)
    world.engines[1].serves = True
    world.routed = None
    world.pass_time(100)
    world.frontend.serves = False
    world.pass_time(100)
    assert world.replaced == []


def test_a_frontend_that_starts_again_is_given_time_and_not_replaced_for_an_engine(
    world: World,
) -> None:
    """It waits for that engine, and would wait for ever for one that has lost its lease."""
    world.routed = frozenset({1})
    world.frontend.serves = False
    world.pass_time(UNROUTED_BOUND_S - 1)
    assert world.replaced == []
    world.pass_time(5)
    assert world.replaced == ['engine 2 of 2']


def test_what_cannot_be_read_is_no_reason_to_replace_anything(world: World) -> None:
    world.routed = frozenset({1})
    world.unreadable = {2}
    world.pass_time(100)
    assert world.replaced == []


def test_a_new_process_in_the_place_has_all_the_time_again(world: World) -> None:
    world.routed = frozenset({1})
    for pid in (3, 4, 5, 6):
        world.engines[1].status.pid = pid
        world.pass_time(UNROUTED_BOUND_S - 4)
    assert world.replaced == []


def test_the_ports_of_a_process_are_those_on_which_it_listens() -> None:
    with socket.socket() as listener, socket.socket() as bound:
        listener.bind(('127.0.0.1', 0))
        listener.listen()
        bound.bind(('127.0.0.1', 0))
        ports = listening_ports(os.getpid())
        assert listener.getsockname()[1] in ports
        assert bound.getsockname()[1] not in ports
    assert listening_ports(2**22 + 1) == frozenset()
