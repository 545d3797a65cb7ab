"""Asking a server on a thread apart, for it may take its time to answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar('T')


class Prober:
    """Runs the probes of one service, so that a silent one delays nobody else.

    A daemon thread and no executor: at the interpreter's exit executors shut down before the
    servers are stopped, and to be watched until then is what the servers need.
    """

    def __init__(self, name: str) -> None:
        self._questions: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, ask: Callable[[float], T], timeout_s: float) -> Future[T]:
        """Asks soon; the result is what ``ask`` finds."""
        future: Future[Any] = Future()
        self._questions.put((future, partial(ask, timeout_s)))
        return future

    def end(self) -> None:
        """Lets the thread end once the probe under way has its answer; does not wait for it."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            future, ask = question
            try:
                future.set_result(ask())
            except Exception as error:  # noqa: BLE001 - for the one who waits
                future.set_exception(error)
