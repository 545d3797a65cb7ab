"""vLLM's own OpenAI-compatible server, without Dynamo, in one Beam worker."""

from __future__ import annotations

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
from apache_beam_vllm_dynamo._commands import native_server_command
from apache_beam_vllm_dynamo._private_directory import PrivateDirectory
from apache_beam_vllm_dynamo._probes import Reply
from apache_beam_vllm_dynamo._process import stop_all
from apache_beam_vllm_dynamo._readiness import await_probe, with_free_addresses
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._service import Service, ServiceSpec
from apache_beam_vllm_dynamo._supervisor import Supervisor
from apache_beam_vllm_dynamo.errors import RuntimeFailedError

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
        self._service: Service | None = None
        self._supervisor: Supervisor | None = None
        self._directory: PrivateDirectory | None = None
        self._port: int | None = None

    def start(self) -> None:
        """Starts the server and returns when a request for one token was answered.

        Raises:
          StartError: It did not come up; nothing of it is left.
        """
        with_free_addresses(self._start_once)

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
            self.close(f'the start failed: {type(error).__name__}')
            raise
        supervisor = Supervisor([service], f'{LABEL} supervisor')
        supervisor.start()
        with self._lock:
            self._supervisor = supervisor

    def _launch(self, directory: Path) -> Service:
        template = None
        if self._chat_template is not None:
            template = directory / 'chat_template.jinja'
            template.write_text(self._chat_template, encoding='utf-8')
        [port] = free_ports(1)
        self._port = port
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

        service = Service(
            ServiceSpec(
                LABEL,
                command.argv,
                dict(command.env),
                serves,
                self._stop_timeout_s,
                self._start_timeout_s,
                liveness=partial(_probes.healthy, port),
                scratch=os.fspath(directory),
            )
        )
        self._service = service
        service.launch()
        return service
