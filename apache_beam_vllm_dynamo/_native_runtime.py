"""vLLM's own OpenAI-compatible server, without Dynamo, in one Beam worker."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from apache_beam_vllm_dynamo import _probes
from apache_beam_vllm_dynamo._addresses import LOOPBACK, free_ports
from apache_beam_vllm_dynamo._canary import RankCanary
from apache_beam_vllm_dynamo._commands import (
    CANARY_TIMEOUT_SECS,
    CANARY_WAIT_SECS,
    native_server_command,
)
from apache_beam_vllm_dynamo._device_lock import gpu_claims
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._identity import model_of
from apache_beam_vllm_dynamo._placement import look_up_topology
from apache_beam_vllm_dynamo._preflight import preflight
from apache_beam_vllm_dynamo._probes import Reply
from apache_beam_vllm_dynamo._readiness import await_probe
from apache_beam_vllm_dynamo._service import ServiceSpec
from apache_beam_vllm_dynamo._supervised import SupervisedRuntime, environment_of_worker
from apache_beam_vllm_dynamo.config import DynamoVLLMEngineSpec


class NativeVLLMRuntime(SupervisedRuntime):
    """One server.

    Args:
      model_name: The model, as vLLM takes it.
      spec: The flags of the server.
      chat_template: The text of a chat template over the model's own, or ``None``.
      start_timeout_s: How long the start may take, in seconds, model load included.
      stop_timeout_s: How long the server is given to end by itself, in seconds.
      hang_timeout_s: How long it may leave requests for one token unanswered, in seconds.
      env: The worker's environment; the process's own when ``None``. It is never changed.
      named: The variables of it that were set for these servers.
    """

    _noun: ClassVar[str] = 'server'

    def __init__(
        self,
        model_name: str,
        spec: DynamoVLLMEngineSpec,
        *,
        chat_template: str | None,
        start_timeout_s: float,
        stop_timeout_s: float,
        hang_timeout_s: float,
        env: Mapping[str, str] | None = None,
        named: Collection[str] = (),
    ) -> None:
        base_env = environment_of_worker(env)
        self._model_name = model_name
        self._server = spec
        self._stop_timeout_s = stop_timeout_s
        self._hang_timeout_s = hang_timeout_s
        self._port: int | None = None
        topology = look_up_topology(base_env)
        # On CPU cores, which can be shared, or where vLLM has to find out itself, there are none.
        self._gpus = (topology.gpus or ())[: spec.devices_needed]
        super().__init__(
            (model_of(model_name), spec, topology.gpus, start_timeout_s, hang_timeout_s),
            description=f'model {model_name!r} (native vLLM)',
            claims=gpu_claims((), len(self._gpus), self._gpus, topology.uuids),
            env=base_env,
            named=named,
            chat_template=chat_template,
            start_timeout_s=start_timeout_s,
        )

    @property
    def window(self) -> int:
        """How many requests the server runs at once."""
        return self._server.max_num_seqs

    @property
    def kv_caches(self) -> int:
        """How many KV caches the server has: one for each of its data-parallel ranks."""
        return self._server.data_parallel_size

    def counts(self) -> Mapping[str, int]:
        """Nothing: what is counted of Dynamo's parts has no like in one server."""
        return {}

    def _base_url(self) -> str | None:
        return None if self._port is None else f'http://{LOOPBACK}:{self._port}'

    def _forget_addresses(self) -> None:
        self._port = None

    def _bring_up(self, directory: Path, deadline: float) -> None:
        subject = Subject(
            given=True,
            model_name=self._model_name,
            config=None,
            native_kwargs=self._server.vllm_server_kwargs,
        )
        preflight(subject, directory, chat_template=self._chat_template, env=self._base_env)
        template = self._write_template(directory)
        [port] = free_ports(1)

        def renew(taken: bool) -> ServiceSpec:  # noqa: FBT001 - the only argument
            nonlocal port
            if taken:
                [port] = free_ports(1)
            with self._lock:
                self._port = port
            return self._spec(port, directory, template)

        server = self._launch(renew)
        await_probe(server, [server], deadline, self._start_timeout_s)

    def _spec(self, port: int, directory: Path, template: Path | None) -> ServiceSpec:
        command = native_server_command(
            self._model_name,
            self._server.vllm_server_kwargs,
            port=port,
            python=sys.executable,
            base_env=self._base_env,
            directory=directory,
            chat_template=template,
        )
        model = self._model_name

        def serves(timeout_s: float) -> Reply | None:
            return _probes.healthy(port, timeout_s) or _probes.answers(port, model)

        ranks = self.kv_caches
        canary = RankCanary(
            ranks,
            partial(_probes.signs_of_ranks, port, ranks),
            # The only rank of a server is not named to it.
            lambda rank, timeout_s: _probes.answers(
                port, model, timeout_s, rank if ranks > 1 else None
            ),
            wait_s=CANARY_WAIT_SECS,
            timeout_s=CANARY_TIMEOUT_SECS,
        )

        def computes(timeout_s: float) -> Reply | None:
            return _probes.healthy(port, timeout_s) or canary(timeout_s)

        return ServiceSpec(
            'vLLM server',
            command.argv,
            dict(command.env),
            serves,
            self._stop_timeout_s,
            self._start_timeout_s,
            unwell_bound_s=self._hang_timeout_s,
            liveness=computes,
            devices=self._gpus,
        )
