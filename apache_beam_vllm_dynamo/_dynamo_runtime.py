"""The Dynamo stack of one Beam worker: etcd, event broker, frontend and N engines."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from apache_beam_vllm_dynamo import _commands, _probes
from apache_beam_vllm_dynamo._addresses import allocate
from apache_beam_vllm_dynamo._commands import Command, Stack
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._placement import Topology, look_up_topology, place
from apache_beam_vllm_dynamo._private_directory import PrivateDirectory
from apache_beam_vllm_dynamo._probes import Reply
from apache_beam_vllm_dynamo._process import stop_all
from apache_beam_vllm_dynamo._readiness import (
    await_engines,
    await_probe,
    with_free_addresses,
)
from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._service import Service, ServiceSpec
from apache_beam_vllm_dynamo._supervisor import Supervisor
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import RuntimeFailedError

_LOGGER = logging.getLogger(__name__)

HELPER_GRACE_S = 3.0  # etcd, broker and frontend end within a second of TERM
HELPER_START_BOUND_S = 60.0  # they serve after a second or two, a frontend under load after seven


class _DynamoLocalRuntime:
    """Starts the stack, proves that it serves, and takes it down again.

    Args:
      model_name: The model, as ``dynamo.vllm`` takes it.
      config: The engines and the router.
      chat_template: The text of a chat template over the model's own, or ``None``.
      env: The worker's environment; the process's own when ``None``. It is never changed.
      topology: The worker's devices; looked up when ``None``.
    """

    def __init__(
        self,
        model_name: str,
        config: DynamoRuntimeConfig,
        *,
        chat_template: str | None = None,
        env: Mapping[str, str] | None = None,
        topology: Topology | None = None,
    ) -> None:
        self._model_name = model_name
        self._base_env = dict(os.environ if env is None else env)
        self._config = place(config, topology or look_up_topology(self._base_env))
        self._chat_template = chat_template
        self._lock = threading.Lock()
        self._services: list[Service] = []
        self._stack: Stack | None = None
        self._supervisor: Supervisor | None = None
        self._directory: PrivateDirectory | None = None

    def start(self) -> None:
        """Starts everything and returns when requests can be sent.

        Ready means that every engine's own health endpoint serves, that the frontend routes
        to all of them, and that a request for one token was answered.

        Raises:
          StartError: Something did not come up; whatever had started is gone again.
        """
        with_free_addresses(self._start_once)

    def endpoint(self) -> str:
        """Where requests go, without a path.

        Raises:
          RuntimeFailedError: The runtime was given up or closed.
        """
        with self._lock:
            stack, supervisor = self._stack, self._supervisor
        if supervisor is not None and supervisor.failure is not None:
            raise supervisor.failure
        if stack is None:
            raise RuntimeFailedError('The runtime was closed.')
        return stack.addresses.base_url

    @property
    def window(self) -> int:
        """How many requests the engines run at once, all together."""
        return sum(spec.max_num_seqs for spec in self._config.listed_engines)

    def statuses(self) -> tuple[ChildStatus, ...]:
        """What is known of each child."""
        return tuple(service.status for service in self._services)

    def migrations(self) -> int | None:
        """How many requests have moved to another engine, as the frontend counts them."""
        with self._lock:
            stack = self._stack
        return None if stack is None else _probes.migrations(stack.addresses.frontend_port)

    def close(self, reason: str = 'closed') -> None:
        """Stops engines, frontend, broker and etcd, in this order, and removes the directory.

        Takes at most ``stop_timeout_secs`` for the engines and three seconds for each of the
        others, and five more for each step where something has to be killed. Closing twice
        is no error.
        """
        with self._lock:
            supervisor, self._supervisor = self._supervisor, None
            self._stack = None
            directory, self._directory = self._directory, None
        if supervisor is not None:
            supervisor.end()
        self._stop_services(reason)
        if directory is not None:
            directory.remove()

    def _start_once(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_secs
        self._services = []
        try:
            self._directory = PrivateDirectory.make()
            stack = self._plan(self._directory.path)
            helpers = self._start_helpers(stack, deadline)
            engines = self._start_frontend_and_engines(stack, helpers)
            self._await_ready(engines, deadline)
        except BaseException as error:
            self.close(f'the start failed: {type(error).__name__}')
            raise
        supervisor = Supervisor(self._services, f'{stack.namespace} supervisor')
        supervisor.start()
        with self._lock:
            self._stack, self._supervisor = stack, supervisor

    def _plan(self, directory: Path) -> Stack:
        template = None
        if self._chat_template is not None:
            template = directory / 'chat_template.jinja'
            template.write_text(self._chat_template, encoding='utf-8')
            if self._config.engine_kind == 'simulated':
                _LOGGER.warning(
                    "Simulated engines use the model's own chat template, not chat_template_path."
                )
        external = self._base_env.get('ETCD_ENDPOINTS', '').strip() or None
        return Stack(
            config=self._config,
            model_name=self._model_name,
            addresses=allocate(directory, len(self._config.listed_engines)),
            namespace=f'beam-{uuid.uuid4().hex[:12]}',
            python=sys.executable,
            base_env=self._base_env,
            external_etcd=external if self._config.discovery == 'etcd' else None,
            chat_template=template,
        )

    def _start_helpers(self, stack: Stack, deadline: float) -> list[Service]:
        """Starts what engines and frontend need; they fail without it."""
        helpers: list[Service] = []
        if stack.starts_etcd:
            program = find_etcd(self._config.etcd_path, self._base_env.get('PATH'))
            port = stack.addresses.etcd_client_port
            command = _commands.etcd_command(program, stack)
            etcd = self._launch('etcd', command, lambda t: _probes.etcd_serves(port, t))
            helpers.append(etcd)
            await_probe(etcd, self._services, deadline, self._config.start_timeout_secs)
        broker = self._launch('event broker', _commands.event_broker_command(stack), lambda _: None)
        broker.came_up()
        return [*helpers, broker]

    def _start_frontend_and_engines(self, stack: Stack, helpers: list[Service]) -> list[Service]:
        port, model, namespace = stack.addresses.frontend_port, stack.model_name, stack.namespace
        engines: list[Service] = []

        def frontend_serves(timeout_s: float) -> Reply | None:
            expected = sum(engine.serves for engine in engines)
            return _probes.frontend_serves(port, model, namespace, expected, timeout_s)

        self._launch('frontend', _commands.frontend_command(stack), frontend_serves, needs=helpers)
        specs = stack.config.listed_engines
        for index, spec in enumerate(specs):
            engine = self._launch(
                f'engine {index + 1} of {len(specs)}',
                _commands.engine_command(stack, index),
                partial(_probes.healthy, stack.addresses.engines[index].system_port),
                needs=helpers,
                stop_grace_s=self._config.stop_timeout_secs,
                start_bound_s=self._config.start_timeout_secs,
                devices=spec.gpu_devices or tuple(map(str, spec.cpu_cores)),
            )
            engines.append(engine)
        return engines

    def _await_ready(self, engines: list[Service], deadline: float) -> None:
        total_s = self._config.start_timeout_secs
        await_engines(engines, self._services, deadline, total_s)
        frontend = next(s for s in self._services if s.spec.label == 'frontend')
        await_probe(frontend, self._services, deadline, total_s)

    def _launch(
        self,
        label: str,
        command: Command,
        probe: Callable[[float], Reply | None],
        *,
        liveness: Callable[[float], Reply | None] | None = None,
        needs: Sequence[Service] = (),
        stop_grace_s: float = HELPER_GRACE_S,
        start_bound_s: float = HELPER_START_BOUND_S,
        devices: tuple[str, ...] = (),
    ) -> Service:
        spec = ServiceSpec(
            label,
            command.argv,
            dict(command.env),
            probe,
            stop_grace_s,
            start_bound_s,
            devices,
            liveness,
            os.fspath(self._directory.path) if self._directory is not None else None,
        )
        service = Service(spec, needs)
        self._services.append(service)
        service.launch()
        return service

    def _stop_services(self, reason: str) -> None:
        engines = [s for s in self._services if s.spec.label.startswith('engine')]
        # Each step needs those after it to leave in good order.
        steps = [engines, *([s] for s in reversed(self._services) if s not in engines)]
        for step in steps:
            stop_all([s.process for s in step if s.process is not None], reason)
            for service in step:
                service.stopped()
