"""The Dynamo stack of one Beam worker: etcd, event broker, frontend and N engines."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from apache_beam_vllm_dynamo import _commands, _probes
from apache_beam_vllm_dynamo._addresses import (
    Addresses,
    allocate,
    move_engine,
    move_etcd,
    move_frontend,
)
from apache_beam_vllm_dynamo._commands import Command, Stack
from apache_beam_vllm_dynamo._device_lock import Claim, core_claims, gpu_claims
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._external_etcd import ExternalEtcd
from apache_beam_vllm_dynamo._identity import model_of
from apache_beam_vllm_dynamo._placement import Topology, look_up_topology, place
from apache_beam_vllm_dynamo._preflight import preflight
from apache_beam_vllm_dynamo._probes import Reply
from apache_beam_vllm_dynamo._readiness import await_engines, await_probe
from apache_beam_vllm_dynamo._routing import RoutingWatch, unrouted
from apache_beam_vllm_dynamo._runtime import ENGINE_REQUESTS
from apache_beam_vllm_dynamo._service import HELPER_RESTART_POLICY, Need, Service, ServiceSpec
from apache_beam_vllm_dynamo._supervised import SupervisedRuntime, environment_of_worker
from apache_beam_vllm_dynamo._supervisor import Watch
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig, EnginesPerWorker
from apache_beam_vllm_dynamo.errors import StartError

_LOGGER = logging.getLogger(__name__)

HELPER_GRACE_S = 3.0  # etcd, broker and frontend end within a second of TERM
HELPER_START_BOUND_S = 60.0  # they serve after a second or two, a frontend under load after seven
ENDPOINT_PAUSE_S = 0.05  # between looks whether the frontend serves again


class _DynamoLocalRuntime(SupervisedRuntime):
    """The stack; ready when every engine serves and the frontend routes to all of them.

    Its stop takes engines, frontend, broker and etcd in this order: at most
    ``stop_timeout_secs`` for the engines and three seconds for each of the others.

    Args:
      model_name: The model, as ``dynamo.vllm`` takes it.
      config: The engines and the router.
      chat_template: The text of a chat template over the model's own, or ``None``.
      env: The worker's environment; the process's own when ``None``. It is never changed.
      named: The variables of it that were set for these servers.
      topology: The worker's devices; looked up when ``None``.
    """

    _noun: ClassVar[str] = 'runtime'

    def __init__(
        self,
        model_name: str,
        config: DynamoRuntimeConfig,
        *,
        chat_template: str | None = None,
        env: Mapping[str, str] | None = None,
        named: Collection[str] = (),
        topology: Topology | None = None,
    ) -> None:
        base_env = environment_of_worker(env)
        topology = topology or look_up_topology(base_env)
        self._model_name = model_name
        self._config = place(config, topology)
        self._stack: Stack | None = None  # what runs, or is on its way to it
        self._frontend: Service | None = None
        self._engines: list[Service] = []
        number = len(self._config.listed_engines)
        engines = '1 engine' if number == 1 else f'{number} engines'
        super().__init__(
            (model_of(model_name), self._config),
            description=f'model {model_name!r} (Dynamo, {engines}, {self._config.router_mode})',
            claims=_claims(config, self._config, topology),
            env=base_env,
            named=named,
            chat_template=chat_template,
            start_timeout_s=config.start_timeout_secs,
        )

    @property
    def window(self) -> int:
        """How many requests the engines run at once, all together."""
        return sum(spec.max_num_seqs for spec in self._config.listed_engines)

    @property
    def kv_caches(self) -> int:
        """How many KV caches the engines have, all together."""
        return sum(spec.data_parallel_size for spec in self._config.listed_engines)

    def endpoint(self) -> str:
        """Where requests go, without a path.

        While the frontend is started again this waits, at most a minute: at first it knows some
        of the engines only, and would give those all requests.

        Raises:
          RuntimeFailedError: The runtime was given up or closed.
        """
        deadline = time.monotonic() + HELPER_START_BOUND_S
        while True:
            base_url = super().endpoint()
            frontend = self._frontend
            if frontend is None or frontend.serves or time.monotonic() >= deadline:
                return base_url
            time.sleep(ENDPOINT_PAUSE_S)

    def counts(self) -> Mapping[str, int]:
        """Requests that moved to another engine, and those that each engine got."""
        with self._lock:
            stack = self._stack if self._ready else None
        if stack is None:
            return {}
        ports = [engine.system_port for engine in stack.addresses.engines]
        counts = {
            'migrated_requests': _probes.migrations(stack.addresses.frontend_port),
            **{
                f'{ENGINE_REQUESTS}{number}': _probes.requests_of_engine(port)
                for number, port in enumerate(ports, start=1)
            },
        }
        return {name: count for name, count in counts.items() if count is not None}

    def _base_url(self) -> str | None:
        return None if self._stack is None else self._stack.addresses.base_url

    def _forget_addresses(self) -> None:
        self._stack = None

    def _bring_up(self, directory: Path, deadline: float) -> None:
        self._engines = []
        # Who asks prompts alone brings a template where the model has none.
        subject = Subject(
            given=True, model_name=self._model_name, config=self._config, asks='chats'
        )
        preflight(subject, directory, chat_template=self._chat_template, env=self._base_env)
        stack = self._stack = self._plan(directory)
        helpers = self._start_helpers(stack, deadline)
        frontend = self._start_frontend_and_engines(stack, helpers)
        await_engines(self._engines, self._services, deadline, self._start_timeout_s)
        await_probe(frontend, self._services, deadline, self._start_timeout_s)
        self._frontend = frontend

    def _watches(self) -> Sequence[Watch]:
        assert self._frontend is not None
        return [RoutingWatch(self._frontend, self._engines, self._routed_ports)]

    def _routed_ports(self, timeout_s: float) -> frozenset[int] | None:
        stack = self._stack
        if stack is None:
            return None
        return _probes.routed_ports(stack.addresses.frontend_port, stack.namespace, timeout_s)

    def _stop_steps(self) -> list[list[Service]]:
        # Each step needs those after it to leave in good order.
        others = [s for s in reversed(self._services) if s not in self._engines]
        return [self._engines, *([service] for service in others)]

    def _plan(self, directory: Path) -> Stack:
        template = self._write_template(directory)
        if template is not None and self._config.engine_kind == 'simulated':
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
            etcd = ExternalEtcd(stack.external_etcd, stack.base_env)
            etcd.await_serving(deadline, self._closed.is_set)
            helpers.append(etcd)
        if stack.starts_etcd:
            program = find_etcd(self._config.etcd_path, self._base_env.get('PATH'))
            own_etcd = self._launch_part(partial(self._etcd_spec, program), move_etcd)
            helpers.append(own_etcd)
            await_probe(own_etcd, self._services, deadline, self._start_timeout_s)
        broker = self._launch_part(_broker_spec)
        broker.came_up()
        return [*helpers, broker]

    def _etcd_spec(self, program: str, stack: Stack) -> ServiceSpec:
        """Its next start, without what it knew when nobody lives any more whom it knew.

        It would list them until their leases end, and some requests would be sent to them. Who
        still lives, and watches it, could not go on with one that begins anew.
        """
        known = [*self._engines, *filter(None, [self._frontend])]
        if not any(service.status.pid for service in known):
            shutil.rmtree(stack.addresses.etcd_directory, ignore_errors=True)
        return _etcd_spec(program, stack)

    def _start_frontend_and_engines(self, stack: Stack, helpers: list[Need]) -> Service:
        frontend = self._launch_part(
            partial(_frontend_spec, self._engines), move_frontend, needs=helpers
        )
        for index in range(len(stack.config.listed_engines)):
            engine = self._launch_part(
                partial(_engine_spec, index), partial(move_engine, index=index), needs=helpers
            )
            self._engines.append(engine)
        return frontend

    def _launch_part(
        self,
        make: Callable[[Stack], ServiceSpec],
        move: Callable[[Addresses], Addresses] | None = None,
        needs: Sequence[Need] = (),
    ) -> Service:
        """Starts one service of the stack.

        Args:
          make: Its spec, from the stack as it is at each start.
          move: Gives it other addresses, where its own were taken by others.
          needs: What it cannot start without.
        """

        def renew(taken: bool) -> ServiceSpec:  # noqa: FBT001 - the only argument
            with self._lock:
                stack = self._stack
                if stack is None:
                    raise self._was_closed()
                if taken and move is not None:
                    stack = dataclasses.replace(stack, addresses=move(stack.addresses))
                    self._stack = stack
            return make(stack)

        return self._launch(renew, needs)


def _claims(
    config: DynamoRuntimeConfig, placed: DynamoRuntimeConfig, topology: Topology
) -> list[Claim]:
    """What the engines need to themselves, or with others of their kind."""
    if placed.engine_kind == 'gpu':
        claims = [
            claim
            for spec in placed.listed_engines
            for claim in gpu_claims(
                spec.gpu_devices, spec.devices_needed, topology.gpus, topology.uuids
            )
        ]
        _check_apart(claims)
        return claims
    if placed.engine_kind == 'cpu' and not isinstance(config.engines, EnginesPerWorker):
        # As the user named them: a share of all cores can be had by others too.
        return [claim for spec in config.listed_engines for claim in core_claims(spec.cpu_cores)]
    return []


def _check_apart(claims: Sequence[Claim]) -> None:
    named: dict[str, str] = {}
    for claim in claims:
        if not claim.shared and named.setdefault(claim.lock, claim.device) != claim.device:
            raise StartError(
                f'{named[claim.lock]} and {claim.device} are one; give each engine its own.'
            )


def _etcd_spec(program: str, stack: Stack) -> ServiceSpec:
    probe = partial(_probes.etcd_serves, stack.addresses.etcd_client_port)
    return _helper_spec('etcd', _commands.etcd_command(program, stack), probe)


def _broker_spec(stack: Stack) -> ServiceSpec:
    command = _commands.event_broker_command(stack)
    return _helper_spec('event broker', command, lambda _: None)


def _helper_spec(
    label: str, command: Command, probe: Callable[[float], Reply | None]
) -> ServiceSpec:
    spec = _spec(label, command, probe)
    return dataclasses.replace(spec, restart_policy=HELPER_RESTART_POLICY)


def _frontend_spec(engines: Sequence[Service], stack: Stack) -> ServiceSpec:
    port, model, namespace = stack.addresses.frontend_port, stack.model_name, stack.namespace

    def serves(timeout_s: float) -> Reply | None:
        serving = sum(engine.serves for engine in engines)
        reply = _probes.healthy(port, timeout_s)
        if reply is not None or not serving:  # without engines nothing else can be asked of it
            return reply
        routed = _probes.routed_ports(port, namespace, timeout_s)
        # By name, for a dead engine stays listed for some seconds and would be counted.
        missing = unrouted(engines, routed or frozenset())
        if missing:
            labels = ', '.join(label for label, _ in missing)
            return Reply(None, problem=f'it does not route to {labels}')
        return _probes.frontend_serves(port, model, namespace, serving, timeout_s)

    return _spec(
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
            f'engine {index + 1} of {len(config.listed_engines)}',
            _commands.engine_command(stack, index),
            partial(_probes.healthy, stack.addresses.engines[index].system_port),
        ),
        stop_grace_s=config.stop_timeout_secs,
        start_bound_s=config.start_timeout_secs,
        unwell_bound_s=config.hang_timeout_secs,
        devices=spec.gpu_devices or tuple(map(str, spec.cpu_cores)),
    )


def _spec(
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
    )
