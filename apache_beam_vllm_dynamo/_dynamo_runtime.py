"""The Dynamo stack of one Beam worker: etcd, event broker, frontend and N engines."""

from __future__ import annotations

import dataclasses
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
from apache_beam_vllm_dynamo._addresses import (
    Addresses,
    allocate,
    move_engine,
    move_etcd,
    move_frontend,
)
from apache_beam_vllm_dynamo._commands import Command, Stack
from apache_beam_vllm_dynamo._device_lock import DeviceLocks, devices_to_lock
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._external_etcd import ExternalEtcd
from apache_beam_vllm_dynamo._marker import kill_orphans
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
from apache_beam_vllm_dynamo._routing import RoutingWatch
from apache_beam_vllm_dynamo._service import Need, Service, ServiceSpec
from apache_beam_vllm_dynamo._supervisor import Supervisor
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import RuntimeFailedError, StartError

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
        self._closed = threading.Event()
        self._locks = DeviceLocks(self, self._gpus(topology))
        self._services: list[Service] = []
        self._stack: Stack | None = None  # what runs, or is on its way to it
        self._ready = False
        self._supervisor: Supervisor | None = None
        self._directory: PrivateDirectory | None = None

    @property
    def identity(self) -> object:
        """Equal for two loads of the same model with the same config."""
        return type(self), self._model_name, self._config, self._chat_template

    def start(self) -> None:
        """Starts everything and returns when requests can be sent.

        Ready means that every engine's own health endpoint serves, that the frontend routes
        to all of them, and that a request for one token was answered. A stack of the same
        model and config that this process started earlier on the same GPUs is closed first;
        one of another process is waited for.

        Raises:
          StartError: Something did not come up; whatever had started is gone again.
        """
        for orphan in kill_orphans():
            _LOGGER.warning('Process %d of a dead owner does not end.', orphan)
        self._locks.acquire(self._config.start_timeout_secs, self._closed.is_set)
        try:
            with_free_addresses(self._start_once)
        except BaseException as error:
            self._locks.release()
            if self._closed.is_set() and isinstance(error, Exception):
                raise StartError('The start was given up: the runtime was closed.') from error
            raise

    def endpoint(self) -> str:
        """Where requests go, without a path.

        Raises:
          RuntimeFailedError: The runtime was given up or closed.
        """
        with self._lock:
            stack = self._stack if self._ready else None
            supervisor = self._supervisor
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
            stack = self._stack if self._ready else None
        return None if stack is None else _probes.migrations(stack.addresses.frontend_port)

    def close(self, reason: str = 'closed') -> None:
        """Stops engines, frontend, broker and etcd, in this order, and removes the directory.

        Takes at most ``stop_timeout_secs`` for the engines and three seconds for each of the
        others, and five more for each step where something has to be killed. Closing twice
        is no error.
        """
        self._closed.set()
        self._take_down(reason)
        self._locks.release()

    def _take_down(self, reason: str) -> None:
        with self._lock:
            supervisor, self._supervisor = self._supervisor, None
            self._stack, self._ready = None, False
            directory, self._directory = self._directory, None
        if supervisor is not None:
            supervisor.end()
        self._stop_services(reason)
        if directory is not None:
            directory.remove()

    def _gpus(self, topology: Topology | None) -> list[str]:
        """The GPUs that nobody else may use meanwhile; CPU cores can be shared."""
        if self._config.engine_kind != 'gpu':
            return []
        visible = (topology or look_up_topology(self._base_env)).gpus
        return [
            device
            for spec in self._config.listed_engines
            for device in devices_to_lock(
                spec.gpu_devices, spec.devices_needed, visible, self.identity
            )
        ]

    def _start_once(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_secs
        self._services = []
        try:
            self._directory = PrivateDirectory.make()
            self._stack = self._plan(self._directory.path)
            helpers = self._start_helpers(self._stack, deadline)
            frontend, engines = self._start_frontend_and_engines(self._stack, helpers)
            self._await_ready(frontend, engines, deadline)
            supervisor = self._supervise(frontend, engines)
        except BaseException as error:
            self._take_down(f'the start failed: {type(error).__name__}')
            raise
        with self._lock:
            self._supervisor, self._ready = supervisor, True
        if self._closed.is_set():
            self._take_down('closed during its start')
            raise StartError('The runtime was closed during its start.')

    def _supervise(self, frontend: Service, engines: list[Service]) -> Supervisor:
        def routed(timeout_s: float) -> frozenset[int] | None:
            stack = self._stack
            if stack is None:
                return None
            return _probes.routed_ports(stack.addresses.frontend_port, stack.namespace, timeout_s)

        watch = RoutingWatch(frontend, engines, routed)
        supervisor = Supervisor(self._services, 'vLLM Dynamo supervisor', [watch])
        supervisor.start()
        return supervisor

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

    def _start_helpers(self, stack: Stack, deadline: float) -> list[Need]:
        """Starts what engines and frontend need; they fail without it."""
        helpers: list[Need] = []
        if stack.external_etcd is not None:
            helpers.append(ExternalEtcd(stack.external_etcd))
        if stack.starts_etcd:
            program = find_etcd(self._config.etcd_path, self._base_env.get('PATH'))
            etcd = self._launch(partial(_etcd_spec, program), move_etcd)
            helpers.append(etcd)
            await_probe(etcd, self._services, deadline, self._config.start_timeout_secs)
        broker = self._launch(_broker_spec)
        broker.came_up()
        return [*helpers, broker]

    def _start_frontend_and_engines(
        self, stack: Stack, helpers: list[Need]
    ) -> tuple[Service, list[Service]]:
        engines: list[Service] = []

        def expected() -> int:
            serving = sum(engine.serves for engine in engines)
            # Started again it need not find them all at once: while it does not serve, nobody
            # asks which are missing. Without any, nothing can be asked of it.
            return min(serving, 1) if self._ready else serving

        frontend = self._launch(
            partial(_frontend_spec, expected=expected, started=lambda: self._ready),
            move_frontend,
            needs=helpers,
        )
        engines += [
            self._launch(
                partial(_engine_spec, index), partial(move_engine, index=index), needs=helpers
            )
            for index in range(len(stack.config.listed_engines))
        ]
        return frontend, engines

    def _await_ready(self, frontend: Service, engines: list[Service], deadline: float) -> None:
        total_s = self._config.start_timeout_secs
        await_engines(engines, self._services, deadline, total_s)
        await_probe(frontend, self._services, deadline, total_s)

    def _launch(
        self,
        make: Callable[[Stack], ServiceSpec],
        move: Callable[[Addresses], Addresses] | None = None,
        needs: Sequence[Need] = (),
    ) -> Service:
        """Starts one service.

        Args:
          make: Its spec, from the stack as it is at each start.
          move: Gives it other addresses, where its own were taken by others.
          needs: What it cannot start without.
        """

        def renew(taken: bool) -> ServiceSpec:  # noqa: FBT001 - the only argument
            with self._lock:
                stack = self._stack
                if stack is None:
                    raise StartError('The runtime was closed.')
                if taken and move is not None:
                    stack = dataclasses.replace(stack, addresses=move(stack.addresses))
                    self._stack = stack
            return make(stack)

        service = Service(renew(False), needs, self._locks.fds, renew)
        self._services.append(service)
        if self._closed.is_set():
            raise StartError('The runtime was closed.')
        service.launch()
        if self._closed.is_set() and service.process is not None:
            service.process.kill('the runtime was closed')
            raise StartError('The runtime was closed.')
        return service

    def _stop_services(self, reason: str) -> None:
        engines = [s for s in self._services if s.spec.label.startswith('engine')]
        # Each step needs those after it to leave in good order.
        steps = [engines, *([s] for s in reversed(self._services) if s not in engines)]
        for step in steps:
            stop_all([s.process for s in step if s.process is not None], reason)
            for service in step:
                service.stopped()


def _etcd_spec(program: str, stack: Stack) -> ServiceSpec:
    probe = partial(_probes.etcd_serves, stack.addresses.etcd_client_port)
    return _spec(stack, 'etcd', _commands.etcd_command(program, stack), probe)


def _broker_spec(stack: Stack) -> ServiceSpec:
    return _spec(stack, 'event broker', _commands.event_broker_command(stack), lambda _: None)


def _frontend_spec(
    stack: Stack, *, expected: Callable[[], int], started: Callable[[], bool]
) -> ServiceSpec:
    port, model, namespace = stack.addresses.frontend_port, stack.model_name, stack.namespace

    def serves(timeout_s: float) -> Reply | None:
        engines = expected()
        if started() and not engines:
            return _probes.healthy(port, timeout_s)
        return _probes.frontend_serves(port, model, namespace, engines, timeout_s)

    return _spec(
        stack,
        'frontend',
        _commands.frontend_command(stack),
        serves,
        liveness=partial(_probes.healthy, port),
    )


def _engine_spec(index: int, stack: Stack) -> ServiceSpec:
    config = stack.config
    spec = config.listed_engines[index]
    return dataclasses.replace(
        _spec(
            stack,
            f'engine {index + 1} of {len(config.listed_engines)}',
            _commands.engine_command(stack, index),
            partial(_probes.healthy, stack.addresses.engines[index].system_port),
        ),
        stop_grace_s=config.stop_timeout_secs,
        start_bound_s=config.start_timeout_secs,
        devices=spec.gpu_devices or tuple(map(str, spec.cpu_cores)),
    )


def _spec(
    stack: Stack,
    label: str,
    command: Command,
    probe: Callable[[float], Reply | None],
    liveness: Callable[[float], Reply | None] | None = None,
) -> ServiceSpec:
    return ServiceSpec(
        label,
        command.argv,
        dict(command.env),
        probe,
        HELPER_GRACE_S,
        HELPER_START_BOUND_S,
        liveness=liveness,
        scratch=os.fspath(stack.addresses.directory),
    )
