"""vLLM's own OpenAI-compatible server, without Dynamo, in one Beam worker."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from apache_beam_vllm_dynamo import _probes
from apache_beam_vllm_dynamo._addresses import free_ports
from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo._checks import positive_int_argument
from apache_beam_vllm_dynamo._commands import native_server_command
from apache_beam_vllm_dynamo._device_lock import DeviceLocks, devices_to_lock
from apache_beam_vllm_dynamo._marker import kill_orphans
from apache_beam_vllm_dynamo._placement import look_up_topology
from apache_beam_vllm_dynamo._private_directory import PrivateDirectory
from apache_beam_vllm_dynamo._probes import Reply
from apache_beam_vllm_dynamo._process import stop_all
from apache_beam_vllm_dynamo._readiness import await_probe, with_free_addresses
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._service import Service, ServiceSpec
from apache_beam_vllm_dynamo._supervisor import Supervisor
from apache_beam_vllm_dynamo.errors import RuntimeFailedError, StartError

_LOGGER = logging.getLogger(__name__)

LABEL = 'vLLM server'


class NativeVLLMRuntime:
    """Starts the server, proves that it serves, and keeps it so.

    Args:
      model_name: The model, as vLLM takes it.
      arguments: Further flags of the server, their names normalized.
      window: How many requests it runs at once.
      chat_template: The text of a chat template over the model's own, or ``None``.
      start_timeout_s: How long the start may take, in seconds, model load included.
      stop_timeout_s: How long the server is given to end by itself, in seconds.
      env: The worker's environment; the process's own when ``None``. It is never changed.
    """

    def __init__(
        self,
        model_name: str,
        arguments: Mapping[str, ServerArgument],
        *,
        window: int,
        chat_template: str | None,
        start_timeout_s: float,
        stop_timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.window = window
        self._model_name = model_name
        self._arguments = dict(arguments)
        self._chat_template = chat_template
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._base_env = dict(os.environ if env is None else env)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._locks = DeviceLocks(self, self._gpus())
        self._service: Service | None = None
        self._supervisor: Supervisor | None = None
        self._directory: PrivateDirectory | None = None
        self._port: int | None = None

    @property
    def identity(self) -> object:
        """Equal for two loads of the same model with the same flags."""
        arguments = json.dumps(self._arguments, sort_keys=True)
        return type(self), self._model_name, arguments, self._chat_template

    def start(self) -> None:
        """Starts the server and returns when a request for one token was answered.

        A server of the same model and flags that this process started earlier on the same GPUs
        is closed first; one of another process is waited for.

        Raises:
          StartError: It did not come up; nothing of it is left.
        """
        for orphan in kill_orphans():
            _LOGGER.warning('Process %d of a dead owner does not end.', orphan)
        self._locks.acquire(self._start_timeout_s, self._closed.is_set)
        try:
            with_free_addresses(self._start_once)
        except BaseException as error:
            self._locks.release()
            if self._closed.is_set() and isinstance(error, Exception):
                raise StartError('The start was given up: the server was closed.') from error
            raise

    def endpoint(self) -> str:
        """Where requests go, without a path.

        Raises:
          RuntimeFailedError: The server was given up or closed.
        """
        with self._lock:
            port, supervisor = self._port, self._supervisor
        if supervisor is not None and supervisor.failure is not None:
            raise supervisor.failure
        if port is None:
            raise RuntimeFailedError('The server was closed.')
        return f'http://127.0.0.1:{port}'

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of the server."""
        return (self._service.status,) if self._service is not None else ()

    def migrations(self) -> int:
        """None: there is one server."""
        return 0

    def close(self, reason: str = 'closed') -> None:
        """Stops the server; takes at most ``stop_timeout_s`` and five seconds more."""
        self._closed.set()
        self._take_down(reason)
        self._locks.release()

    def _take_down(self, reason: str) -> None:
        with self._lock:
            supervisor, self._supervisor = self._supervisor, None
            directory, self._directory = self._directory, None
            self._port = None
        if supervisor is not None:
            supervisor.end()
        if self._service is not None and self._service.process is not None:
            stop_all([self._service.process], reason)
            self._service.stopped()
        if directory is not None:
            directory.remove()

    def _start_once(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        try:
            self._directory = PrivateDirectory.make()
            service = self._service = self._launch(self._directory.path)
            await_probe(service, [service], deadline, self._start_timeout_s)
        except BaseException as error:
            self._take_down(f'the start failed: {type(error).__name__}')
            raise
        supervisor = Supervisor([service], f'{LABEL} supervisor')
        supervisor.start()
        with self._lock:
            self._supervisor = supervisor
        if self._closed.is_set():
            self._take_down('closed during its start')
            raise StartError('The server was closed during its start.')

    def _gpus(self) -> list[str]:
        """Its place on the GPUs, where there are any; see ``devices_to_lock``."""
        visible = look_up_topology(self._base_env).gpus
        if not visible:
            return []  # on CPU cores, which can be shared, or vLLM has to find out itself
        needed = math.prod(
            positive_int_argument(self._arguments, flags, default=1)
            for flags in (
                ('tensor-parallel-size', 'tp'),
                ('pipeline-parallel-size', 'pp'),
                ('data-parallel-size', 'dp'),
            )
        )
        return devices_to_lock((), needed, visible, self.identity)

    def _launch(self, directory: Path) -> Service:
        template = None
        if self._chat_template is not None:
            template = directory / 'chat_template.jinja'
            template.write_text(self._chat_template, encoding='utf-8')
        [port] = free_ports(1)
        spec = self._spec(port, directory, template)

        def renew(taken: bool) -> ServiceSpec:  # noqa: FBT001 - the only argument
            nonlocal spec
            if taken:
                [other] = free_ports(1)
                spec = self._spec(other, directory, template)
                with self._lock:
                    self._port = other
            return spec

        with self._lock:
            self._port = port
        service = self._service = Service(spec, (), self._locks.fds, renew)
        if self._closed.is_set():
            raise StartError('The server was closed.')
        service.launch()
        if self._closed.is_set() and service.process is not None:
            service.process.kill('the server was closed')
            raise StartError('The server was closed.')
        return service

    def _spec(self, port: int, directory: Path, template: Path | None) -> ServiceSpec:
        command = native_server_command(
            self._model_name,
            self._arguments,
            port=port,
            python=sys.executable,
            base_env=self._base_env,
            chat_template=template,
        )
        model = self._model_name

        def serves(timeout_s: float) -> Reply | None:
            return _probes.healthy(port, timeout_s) or _probes.answers(port, model)

        return ServiceSpec(
            LABEL,
            command.argv,
            dict(command.env),
            serves,
            self._stop_timeout_s,
            self._start_timeout_s,
            liveness=partial(_probes.healthy, port),
            scratch=os.fspath(directory),
        )
