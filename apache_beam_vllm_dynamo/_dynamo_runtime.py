"""The Dynamo stack of one Beam worker: etcd, event broker, frontend and N engines."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from apache_beam_vllm_dynamo import _commands, _probes
from apache_beam_vllm_dynamo._addresses import LONGEST_SOCKET_PATH_BYTES, allocate
from apache_beam_vllm_dynamo._commands import Command, Stack
from apache_beam_vllm_dynamo._diagnosis import diagnose
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._placement import Topology, look_up_topology, place
from apache_beam_vllm_dynamo._process import ChildSpec, ManagedProcess, stop_all
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import ChildExitedError, StartError, StartTimeoutError

_LOGGER = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1  # of a start, whose parts take from half a second to many minutes
PROGRESS_INTERVAL_S = 30.0  # a model load of minutes must not look like a hang
ADDRESS_ATTEMPTS = 3  # starts in all, when ports found free were taken before they were bound
HELPER_GRACE_S = 3.0  # etcd, broker and frontend end within a second of TERM

DIRECTORY_PREFIX = 'vllm-dynamo-'


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
        self._processes: list[ManagedProcess] = []
        self._stack: Stack | None = None

    def start(self) -> None:
        """Starts everything and returns when requests can be sent.

        Ready means that every engine's own health endpoint serves, that the frontend routes
        to all of them, and that a request for one token was answered.

        Raises:
          StartError: Something did not come up; whatever had started is gone again.
        """
        for attempt in range(1, ADDRESS_ATTEMPTS + 1):
            try:
                self._start_once()
                return
            except ChildExitedError as error:
                taken = diagnose(error.log_tail).retry == 'other_addresses'
                if not taken or attempt == ADDRESS_ATTEMPTS:
                    raise
                _LOGGER.warning('%s Starting again on other ports.', error)

    def base_url(self) -> str:
        """Where requests go, without a path."""
        return self._running_stack().addresses.base_url

    def close(self, reason: str = 'closed') -> None:
        """Stops engines, frontend and etcd, in this order, and removes the directory.

        Takes at most ``stop_timeout_secs`` for the engines and ten seconds for each of the
        other steps. Closing twice is no error.
        """
        with self._lock:
            processes, self._processes = self._processes, []
            stack, self._stack = self._stack, None
        # Each of the later ones is needed by the earlier ones to leave in good order.
        engines = [p for p in processes if p.spec.label.startswith('engine')]
        stop_all(engines, reason)
        for process in reversed([p for p in processes if p not in engines]):
            process.stop(reason)
        if stack is not None:
            shutil.rmtree(stack.addresses.directory, ignore_errors=True)

    def _running_stack(self) -> Stack:
        stack = self._stack
        if stack is None:
            raise StartError('The runtime is not running: it was closed, or never started.')
        return stack

    def _start_once(self) -> None:
        deadline = time.monotonic() + self._config.start_timeout_secs
        directory = _private_directory()
        try:
            stack = self._stack = self._plan(directory)
            if stack.starts_etcd:
                program = find_etcd(self._config.etcd_path, self._base_env.get('PATH'))
                etcd = self._launch('etcd', _commands.etcd_command(program, stack))
                self._await_etcd(etcd, stack, deadline)
            self._launch('event broker', _commands.event_broker_command(stack))
            self._launch('frontend', _commands.frontend_command(stack))
            engines = len(stack.config.listed_engines)
            for index in range(engines):
                command = _commands.engine_command(stack, index)
                self._launch(
                    f'engine {index + 1} of {engines}', command, self._config.stop_timeout_secs
                )
            self._await_ready(stack, deadline)
        except BaseException as error:
            self._stack = None
            self.close(f'the start failed: {type(error).__name__}')
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _plan(self, directory: Path) -> Stack:
        template = None
        if self._chat_template is not None:
            template = directory / 'chat_template.jinja'
            template.write_text(self._chat_template, encoding='utf-8')
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

    def _launch(
        self, label: str, command: Command, stop_grace_s: float = HELPER_GRACE_S
    ) -> ManagedProcess:
        spec = ChildSpec(label, command.argv, command.env, stop_grace_s=stop_grace_s)
        process = ManagedProcess(spec)
        self._processes.append(process)
        _LOGGER.debug('starting %s: %s', label, command.argv)
        process.start()
        return process

    def _await_etcd(self, etcd: ManagedProcess, stack: Stack, deadline: float) -> None:
        port = stack.addresses.etcd_client_port
        self._await('etcd to serve', deadline, [etcd], lambda: _probes.etcd_serves(port))

    def _await_ready(self, stack: Stack, deadline: float) -> None:
        progress = _EngineProgress(stack)
        port, model = stack.addresses.frontend_port, stack.model_name
        count = len(stack.config.listed_engines)
        self._await('every engine to serve', deadline, self._processes, progress.look)

        def all_routable() -> str | None:
            found = _probes.routable_engines(port, model, stack.namespace)
            return None if found == count else f'{found} of {count}'

        self._await('the frontend to route to all engines', deadline, self._processes, all_routable)
        self._await(
            'a request for one token to be answered',
            deadline,
            self._processes,
            lambda: _probes.canary(port, model),
        )

    def _await(
        self,
        expected: str,
        deadline: float,
        needed: Sequence[ManagedProcess],
        look: Callable[[], object],
    ) -> None:
        """Polls ``look`` until it finds nothing amiss, while everything ``needed`` lives."""
        while True:
            for process in needed:
                check_alive(process)
            found = look()
            if found is None:
                return
            if time.monotonic() > deadline:
                tail = [line for process in needed for line in process.log_tail(10)]
                raise StartTimeoutError(self._config.start_timeout_secs, expected, str(found), tail)
            time.sleep(POLL_INTERVAL_S)


class _EngineProgress:
    """Watches engines become healthy, and says so as it happens."""

    def __init__(self, stack: Stack) -> None:
        self._ports = [engine.system_port for engine in stack.addresses.engines]
        self._ready: set[int] = set()
        self._started = time.monotonic()
        self._said = self._started

    def look(self) -> str | None:
        total = len(self._ports)
        for index, port in enumerate(self._ports):
            if index not in self._ready and _probes.healthy(port) is None:
                self._ready.add(index)
                _LOGGER.info('engine %d of %d ready after %.0f s', index + 1, total, self._waited())
        if len(self._ready) == total:
            return None
        if time.monotonic() - self._said > PROGRESS_INTERVAL_S:
            self._said = time.monotonic()
            _LOGGER.info(
                '%d of %d engines ready after %.0f s', len(self._ready), total, self._waited()
            )
        return f'{len(self._ready)} of {total} healthy'

    def _waited(self) -> float:
        return time.monotonic() - self._started


def check_alive(process: ManagedProcess) -> None:
    """Raises what a child's end means while it is needed.

    Raises:
      ChildExitedError: It has ended.
    """
    exit_status = process.poll()
    if exit_status is None:
        return
    tail = process.log_tail()
    raise ChildExitedError(process.spec.label, str(exit_status), tail, diagnose(tail).hint)


def _private_directory() -> Path:
    """A new directory of this user alone, with a path that Unix sockets can hold."""
    base = tempfile.gettempdir()
    longest = os.path.join(base, DIRECTORY_PREFIX + 'x' * 8, 'events-out')
    if len(os.fsencode(longest)) > LONGEST_SOCKET_PATH_BYTES:
        base = '/tmp'
    return Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=base))
