"""The life of a group of servers on a worker, whichever servers they are.

What every runtime owes is here: the locks on its devices, a directory of its own, a start that
leaves nothing behind when it fails or is given up, a supervisor while it runs, and a stop.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from apache_beam_vllm_dynamo._device_lock import Claim, DeviceLocks
from apache_beam_vllm_dynamo._identity import identity_of, installation, settings_of
from apache_beam_vllm_dynamo._marker import kill_orphans
from apache_beam_vllm_dynamo._private_directory import PrivateDirectory
from apache_beam_vllm_dynamo._process import stop_all
from apache_beam_vllm_dynamo._readiness import with_free_addresses
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._service import Need, Service, ServiceSpec
from apache_beam_vllm_dynamo._supervisor import Supervisor, Watch
from apache_beam_vllm_dynamo.errors import RuntimeFailedError, StartError

_LOGGER = logging.getLogger(__name__)


class SupervisedRuntime(abc.ABC):
    """Starts servers, proves that they serve, keeps them so, and takes them down again.

    Args:
      settings: What makes it what it is, beside its environment.
      description: What it is, for the messages of others.
      claims: What it needs of devices while its processes live; see ``DeviceLocks``.
      env: The worker's environment, which is never changed.
      named: The variables of it that were set for these servers.
      chat_template: The text of a chat template over the model's own, or ``None``.
      start_timeout_s: How long the start may take, in seconds, model load included.
    """

    _noun: ClassVar[str]
    """What messages call it."""

    def __init__(
        self,
        settings: Sequence[object],
        *,
        description: str,
        claims: Sequence[Claim],
        env: Mapping[str, str],
        named: Collection[str],
        chat_template: str | None,
        start_timeout_s: float,
    ) -> None:
        self._base_env = env
        self._chat_template = chat_template
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._identity = identity_of(
            type(self).__name__, installation(), chat_template, settings_of(env, named), *settings
        )
        self._description = description
        self._locks = DeviceLocks(self, claims)
        self._locked_fds: tuple[int, ...] = ()
        self._hold_fds: tuple[int, ...] = ()
        self._services: list[Service] = []
        self._ready = False
        self._supervisor: Supervisor | None = None
        self._directory: PrivateDirectory | None = None

    @property
    def identity(self) -> str:
        """Equal for two of the same model with the same settings, in any process."""
        return self._identity

    @property
    def description(self) -> str:
        """What it is, for messages."""
        return self._description

    @property
    def ending(self) -> bool:
        """Whether it is about to give its devices back."""
        return self._closed.is_set() or self.failure is not None

    @property
    def failure(self) -> RuntimeFailedError | None:
        """Why it was given up, if it was."""
        supervisor = self._supervisor
        return supervisor.failure if supervisor is not None else None

    def start(self, hold_fds: Sequence[int] = ()) -> None:
        """Starts everything and returns when a request for one token was answered.

        What still holds its devices and is ending is waited for.

        Args:
          hold_fds: Descriptors that its shims keep open until its last process is gone.

        Raises:
          StartError: Something did not come up; whatever had started is gone again.
        """
        self._clear_orphans()
        self._locks.acquire(self._start_timeout_s, self._closed.is_set)
        self._locked_fds = (*hold_fds, *self._locks.fds)
        try:
            # Whoever held the locks may have died just now, with its shims, and left engines.
            self._clear_orphans()
            with_free_addresses(self._start_once)
        except BaseException as error:
            self._release_locks()
            if self._closed.is_set() and isinstance(error, Exception):
                raise StartError(f'The start was given up: the {self._noun} was closed.') from error
            raise

    def _clear_orphans(self) -> None:
        for orphan in kill_orphans():
            _LOGGER.warning('Process %d of a dead owner does not end.', orphan)

    def endpoint(self) -> str:
        """Where requests go, without a path.

        Raises:
          RuntimeFailedError: It was given up or closed.
        """
        with self._lock:
            base_url = self._base_url() if self._ready else None
        if self.failure is not None:
            raise self.failure
        if base_url is None:
            raise RuntimeFailedError(f'The {self._noun} was closed.')
        return base_url

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of each child."""
        return tuple(service.status for service in self._services)

    def close(self, reason: str = 'closed') -> None:
        """Stops everything and removes the directory; closing twice is no error.

        Each step of the stop takes at most the grace of its services, and five seconds more
        where something has to be killed.
        """
        self._closed.set()
        try:
            self._take_down(reason)
        finally:
            self._release_locks()

    @abc.abstractmethod
    def _bring_up(self, directory: Path, deadline: float) -> None:
        """Launches the services and waits until all of them serve."""

    @abc.abstractmethod
    def _base_url(self) -> str | None:
        """Where requests go, while there is such a place; called with the lock."""

    @abc.abstractmethod
    def _forget_addresses(self) -> None:
        """Forgets where its servers listen; called with the lock."""

    def _watches(self) -> Sequence[Watch]:
        """What the supervisor looks at beside each service alone."""
        return ()

    def _stop_steps(self) -> list[list[Service]]:
        """The services in the order of their stop; those of one step end together."""
        return [[service] for service in reversed(self._services)]

    def _start_once(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        if left := self._left():
            raise StartError(
                f'Processes {", ".join(map(str, left))} of the last try have not ended after KILL. '
                'They may hang in the GPU driver; reset the GPU, or restart the machine.'
            )
        self._services = []
        try:
            self._directory = PrivateDirectory.make()
            self._hold_fds = (*self._locked_fds, self._directory.fd)
            self._bring_up(self._directory.path, deadline)
            supervisor = Supervisor(
                self._services,
                f'vLLM {self._noun} supervisor',
                self._watches(),
                self._let_go,
            )
            supervisor.start()
        except BaseException as error:
            self._take_down(f'the start failed: {type(error).__name__}')
            raise
        with self._lock:
            self._supervisor, self._ready = supervisor, True
        if self._closed.is_set():
            self._take_down('closed during its start')
            raise StartError(f'The {self._noun} was closed during its start.')

    def _let_go(self) -> None:
        """Gives back what it has no use for once it was given up; why can still be asked."""
        with self._lock:
            directory, self._directory = self._directory, None
            self._forget_addresses()
        if directory is not None:
            directory.remove()
        self._release_locks()

    def _left(self) -> list[int]:
        """What is left of processes that have been stopped."""
        processes = [s.process for s in self._services if s.process is not None]
        return [pid for process in processes for pid in process.left()]

    def _release_locks(self) -> None:
        # A shim holds them on for what KILL does not end; where it is gone, this process has to.
        ended = [s.process for s in self._services if s.process and s.process.poll() is not None]
        if not any(process.left() for process in ended):
            self._locks.release()

    def _take_down(self, reason: str) -> None:
        with self._lock:
            supervisor, self._supervisor = self._supervisor, None
            directory, self._directory = self._directory, None
            self._ready = False
            self._forget_addresses()
        with contextlib.ExitStack() as steps:
            # They run from the last to the first, each also after one that raised.
            if directory is not None:
                steps.callback(directory.remove)
            for step in reversed(self._stop_steps()):
                steps.callback(_stop, step, reason)
            if supervisor is not None:
                steps.callback(supervisor.end)

    def _launch(self, renew: Callable[[bool], ServiceSpec], needs: Sequence[Need] = ()) -> Service:
        """Starts one service.

        Args:
          renew: Its spec at each start; the argument is whether others took its address.
          needs: What it cannot start without.
        """
        service = Service(renew(False), needs, self._hold_fds, renew)
        self._services.append(service)
        if self._closed.is_set():
            raise self._was_closed()
        service.launch()
        if self._closed.is_set() and service.process is not None:
            service.process.kill(f'the {self._noun} was closed')
            raise self._was_closed()
        return service

    def _was_closed(self) -> StartError:
        return StartError(f'The {self._noun} was closed.')

    def _write_template(self, directory: Path) -> Path | None:
        if self._chat_template is None:
            return None
        template = directory / 'chat_template.jinja'
        template.write_text(self._chat_template, encoding='utf-8')
        return template


def _stop(step: Sequence[Service], reason: str) -> None:
    stop_all([s.process for s in step if s.process is not None], reason)
    for service in step:
        service.stopped()


def environment_of_worker(env: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of ``env``, or of the process's own where it is ``None``."""
    return dict(os.environ if env is None else env)
