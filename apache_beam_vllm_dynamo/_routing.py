"""Notices engines that serve and get no requests, because the frontend does not know of them.

An engine that lost its lease can live on unlisted, and a frontend that was started again can
miss engines. Either looks well from near; together they do not.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from apache_beam_vllm_dynamo._service import Probes, Service

LOOK_INTERVAL_S = 2.0
LOOK_TIMEOUT_S = 3.0  # of the frontend, which answers in milliseconds
# An engine is listed within a second of serving; a loaded machine takes some times that.
UNROUTED_BOUND_S = 20.0

_LISTENS = '0A'  # a socket's state, in /proc/net/tcp


class RoutingWatch:
    """Compares the engines that serve with those that the frontend routes to.

    Args:
      frontend: The frontend.
      engines: The engines.
      routed: Asks the frontend for the ports of the engines that it knows, waiting at most so
        many seconds; ``None`` where it does not answer.
      ports: The ports on which a process listens.
      clock: Seconds that only ever grow.
    """

    def __init__(
        self,
        frontend: Service,
        engines: Sequence[Service],
        routed: Callable[[float], frozenset[int] | None],
        ports: Callable[[int], frozenset[int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._frontend = frontend
        self._engines = tuple(engines)
        self._routed = routed
        self._ports = ports or listening_ports
        self._clock = clock
        self._next_look_at = 0.0
        self._looking: Future[frozenset[int] | None] | None = None
        self._missing_since: dict[tuple[str, int], float] = {}
        self._frontend_replaced = False

    def tick(self, probes: Probes) -> None:
        """Looks, and has replaced what stays unrouted: first the frontend, then engines.

        A frontend that is being started again was replaced already; it does not serve before
        it routes to all engines.

        Raises:
          RuntimeFailedError: Starting it again is given up.
        """
        if self._looking is None:
            if self._clock() >= self._next_look_at:
                self._looking = probes.submit(self._routed, LOOK_TIMEOUT_S)
            return
        if not self._looking.done():
            return
        routed, self._looking = self._looking.result(), None
        now = self._clock()
        self._next_look_at = now + LOOK_INTERVAL_S
        if routed is None:
            self._missing_since.clear()
            return
        if not self._frontend.serves:
            self._frontend_replaced = True
        unknown = unrouted(self._engines, routed, self._ports)
        self._missing_since = {key: self._missing_since.get(key, now) for key in unknown}
        if not unknown:
            self._frontend_replaced = False
        for key, engine in unknown.items():
            if now - self._missing_since[key] >= UNROUTED_BOUND_S:
                self._replace(engine)
                return

    def _replace(self, engine: Service) -> None:
        self._missing_since.clear()
        if not self._frontend_replaced:
            self._frontend_replaced = True
            self._frontend.replace(f'does not route to {engine.spec.label}, which serves')
        else:
            engine.replace('serves, but the frontend does not route to it')


def unrouted(
    engines: Sequence[Service],
    routed: frozenset[int],
    ports: Callable[[int], frozenset[int]] | None = None,
) -> dict[tuple[str, int], Service]:
    """The engines that serve and that a frontend does not know, by label and process id."""
    found = {}
    for engine in engines:
        pid = engine.status.pid
        if not engine.serves or pid is None:
            continue
        listening = (ports or listening_ports)(pid)
        # None at all says only that they could not be read.
        if listening and not listening & routed:
            found[engine.spec.label, pid] = engine
    return found


def listening_ports(pid: int) -> frozenset[int]:
    """The TCP ports on which a process listens."""
    inodes = set()
    with contextlib.suppress(OSError):  # it has ended
        for link in Path(f'/proc/{pid}/fd').iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix('socket:[').removesuffix(']'))
    found = set()
    for name in ('tcp', 'tcp6'):
        with contextlib.suppress(OSError):
            for line in Path('/proc/net', name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and fields[9] in inodes:
                    found.add(int(fields[1].rpartition(':')[2], 16))
    return frozenset(found)
