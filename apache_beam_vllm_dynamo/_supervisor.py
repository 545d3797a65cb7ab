"""Watches the services of a stack for as long as it runs, and puts right what it can."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from apache_beam_vllm_dynamo._prober import Prober
from apache_beam_vllm_dynamo._restart import ChildState
from apache_beam_vllm_dynamo._service import Probes, Service
from apache_beam_vllm_dynamo.errors import RuntimeFailedError

_LOGGER = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1  # what a death costs before its replacement starts


class Watch(Protocol):
    """What looks at several services together."""

    def tick(self, probes: Probes) -> None:
        """Looks once and does what is due; like ``Service.tick``."""


class Supervisor:
    """One thread over all services of one stack.

    Args:
      services: In the order of their start.
      name: What the thread is called.
      watches: What looks at several of them together.
      on_given_up: Called when the stack was given up and its processes are killed.
    """

    def __init__(
        self,
        services: Sequence[Service],
        name: str,
        watches: Sequence[Watch] = (),
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._services = tuple(services)
        self._on_given_up = on_given_up
        self._watches = tuple(watches)
        self._ended = threading.Event()
        self._failure: RuntimeFailedError | None = None
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    @property
    def failure(self) -> RuntimeFailedError | None:
        """Why the stack was given up, if it was."""
        return self._failure

    def end(self) -> None:
        """Stops watching; the services live on. Waits for a restart under way."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        watched: list[Watch] = [*self._services, *self._watches]
        probers = [Prober(f'{self._thread.name} probe {i}') for i in range(len(watched))]
        try:
            while not self._ended.wait(LOOK_INTERVAL_S):
                for watch, prober in zip(watched, probers, strict=True):
                    watch.tick(prober)
        except RuntimeFailedError as error:
            self._give_up(error)
        except Exception as error:
            _LOGGER.exception('the supervisor failed')
            self._give_up(RuntimeFailedError(f'The supervisor failed: {error!r}.'))
        finally:
            for prober in probers:
                prober.end()

    def _give_up(self, error: RuntimeFailedError) -> None:
        _LOGGER.error('%s', error)
        self._failure = error
        # What still runs holds devices for a job that has failed.
        for service in reversed(self._services):
            if service.process is not None:
                service.process.kill('the runtime was given up')
        for service in self._services:
            if service.status.state is not ChildState.FAILED:
                service.stopped()
        self._on_given_up()
