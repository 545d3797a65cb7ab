"""What runs servers, as those that use it see it, and what it has counted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo.errors import RuntimeFailedError

# To read a server's metrics takes it and the reader a millisecond or two, for each of them.
COUNTS_EVERY_S = 1.0
# The name of the metric for the requests of an engine, up to its number.
ENGINE_REQUESTS = 'requests_of_engine_'


class Serving(Protocol):
    """Servers, as those see them who use them."""

    @property
    def window(self) -> int:
        """How many requests are worth having in flight."""

    @property
    def kv_caches(self) -> int:
        """How many KV caches there are: one for each engine, or rank of one."""

    def endpoint(self) -> str:
        """Where requests go, without a path; raises once there is no server any more."""

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of each process."""


class Runtime(Serving, Protocol):
    """What runs the server or servers."""

    @property
    def identity(self) -> str:
        """Equal for two of the same model with the same settings, in any process."""

    @property
    def description(self) -> str:
        """What it is, for messages."""

    @property
    def ending(self) -> bool:
        """Whether it has ended, or is about to."""

    @property
    def failure(self) -> RuntimeFailedError | None:
        """Why it was given up, if it was."""

    def start(self, hold_fds: Sequence[int] = ()) -> None:
        """Starts everything; returns when it serves.

        Args:
          hold_fds: Descriptors that stay open until its last process is gone.
        """

    def counts(self) -> Mapping[str, int]:
        """What the servers have counted since they started, by the name of a metric.

        What cannot be read now is left out; a server that was replaced begins at 0 again.
        """

    def close(self, reason: str = 'closed') -> None:
        """Ends all processes."""


class Events:
    """What happened to a runtime, told once, whoever asks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._counted: dict[str, int] = {}
        self._counting = threading.Lock()
        self._counted_at = -math.inf

    def take(self) -> dict[str, int]:
        """What happened since anybody asked last, by the name of a metric.

        The servers' own counts are read at most once a second; what they counted in between
        comes with the next answer.
        """
        if not self._counting.acquire(blocking=False):
            return {}  # somebody else is at it
        try:
            restarts = sum(status.restarts for status in self._runtime.statuses())
            totals = {'engine_restarts': restarts}
            now = time.monotonic()
            if now - self._counted_at >= COUNTS_EVERY_S:
                self._counted_at = now
                totals |= self._runtime.counts()
            return {name: new for name, total in totals.items() if (new := self._new(name, total))}
        finally:
            self._counting.release()

    def _new(self, name: str, total: int) -> int:
        counted, self._counted[name] = self._counted.get(name, 0), total
        # A server that was replaced counts from 0.
        return total - counted if total >= counted else total
