"""What the two model handlers share: Beam's contract, kept with a vLLM server on the worker."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from apache_beam.utils import multi_process_shared

from apache_beam_vllm_dynamo import _metrics, _reuse
from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo._checks import check_seconds, environment
from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo._clients import Address, ServerClient, client_for
from apache_beam_vllm_dynamo._compatible import compatible_config
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from apache_beam_vllm_dynamo._model_server import _VLLMModelServer, keep
from apache_beam_vllm_dynamo._native_runtime import NativeVLLMRuntime
from apache_beam_vllm_dynamo._preflight import template_for_prompts
from apache_beam_vllm_dynamo._requests import (
    Endpoint,
    PreparedRequest,
    RequestBuilder,
    validate_inference_args,
)
from apache_beam_vllm_dynamo._reserved import check_native_kwargs
from apache_beam_vllm_dynamo._responses import Answer, Outcome
from apache_beam_vllm_dynamo._retry import RequestLimits
from apache_beam_vllm_dynamo._runtime import Runtime
from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
)
from apache_beam_vllm_dynamo.errors import (
    ConfigurationError,
    InferenceError,
    InferenceFailedError,
    StartError,
)
from apache_beam_vllm_dynamo.messages import ChatElement, CompletionElement, size_bytes

OnError = Literal['raise', 'return']
ElementT = TypeVar('ElementT', CompletionElement, ChatElement)

# Batches wait for each other in the window, so that larger ones than it holds gain little.
MAX_BATCH_WINDOWS = 4


class VLLMModelHandler(ModelHandler[ElementT, PredictionResult, _VLLMModelServer]):
    """A handler whose model is a server; the arguments are explained at the two handlers."""

    _endpoint: ClassVar[Endpoint]

    def __init__(  # noqa: PLR0913 - Beam's handlers take as many, and a few are ours
        self,
        model_name: str,
        vllm_server_kwargs: Mapping[str, ServerArgument] | None,
        chat_template_path: str | None,
        *,
        use_dynamo: bool,
        dynamo_runtime_config: DynamoRuntimeConfig | None,
        dynamo_frontend_kwargs: Mapping[str, ServerArgument] | None,
        on_error: OnError,
        max_in_flight: int | None,
        order_by_prefix: bool,
        max_retries: int,
        max_wait_secs: float,
        request_timeout_secs: float,
        element_timeout_secs: float,
        start_timeout_secs: float | None,
        hang_timeout_secs: float | None,
        error_excerpt_chars: int,
        batching: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        _check_model_name(model_name)
        if on_error not in ('raise', 'return'):
            raise ConfigurationError(f"on_error is {on_error!r}; it must be 'raise' or 'return'.")
        if max_in_flight is not None and (type(max_in_flight) is not int or max_in_flight < 1):
            raise ConfigurationError(
                f'max_in_flight is {max_in_flight!r}; it must be a whole number, 1 or more, or '
                'None to size it from the engines.'
            )
        for name, flag in (('use_dynamo', use_dynamo), ('order_by_prefix', order_by_prefix)):
            if not isinstance(flag, bool):
                raise ConfigurationError(f'{name} is {flag!r}; it must be True or False.')
        _check_template_path(chat_template_path)
        given = {'start_timeout_secs': start_timeout_secs, 'hang_timeout_secs': hang_timeout_secs}
        timeouts: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        for name, value in timeouts.items():
            check_seconds(name, value)
        _check_options(options)
        self._model_name = model_name
        self._chat_template_path = chat_template_path
        self._on_error = on_error
        self._max_in_flight = max_in_flight
        self._order_by_prefix = order_by_prefix
        self._limits = RequestLimits(
            request_timeout_s=request_timeout_secs,
            element_timeout_s=element_timeout_secs,
            max_wait_s=max_wait_secs,
            max_retries=max_retries,
            excerpt_chars=error_excerpt_chars,
        )
        self._use_dynamo = use_dynamo
        self._native_server = DynamoVLLMEngineSpec(vllm_server_kwargs=vllm_server_kwargs or {})
        self._config = _config(
            use_dynamo=use_dynamo,
            vllm_server_kwargs=vllm_server_kwargs,
            config=dynamo_runtime_config,
            frontend_kwargs=dynamo_frontend_kwargs,
            timeouts=timeouts,
        )
        if not use_dynamo:
            check_native_kwargs(self._native_server.vllm_server_kwargs, model_name)
        self._timeouts = timeouts
        # Beam would write them into the environment of the whole SDK process.
        self._server_env = environment('env_vars', options.pop('env_vars', None) or {})
        self._collects_over_bundles = batching['max_batch_duration_secs'] is not None
        super().__init__(**self._with_batch_sizes(batching), **options)
        self._client: tuple[str, ServerClient] | None = None
        self._recorded: _metrics.InferenceMetrics | None = None

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._model_name!r}, {self._describe_server()})'

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {'_client': None, '_recorded': None}

    def load_model(self) -> _VLLMModelServer:
        """Starts the server on this worker, or shares one that runs.

        A server of the same model with the same settings is started once on a worker, whichever
        step, reload or SDK process asks for it. What has been asked runs until the last of these
        processes ends; until then it ends when all that was loaded is dropped or closed.

        Raises:
          ConfigurationError: Beam's model manager asks for it.
          StartError: It did not come up; the text holds the end of its log and what to do.
        """
        _check_no_model_manager()
        return _VLLMModelServer(self._runtime)

    def run_inference(
        self,
        batch: Sequence[ElementT],
        model: _VLLMModelServer,
        inference_args: dict[str, Any] | None = None,
    ) -> list[PredictionResult]:
        """Asks the model about each element.

        Args:
          batch: The elements.
          model: What :meth:`load_model` returned, or a proxy of it.
          inference_args: Keyword arguments of the ``openai`` client's ``create()``, for all
            elements.

        Returns:
          One result an element, in order. Its ``inference`` is the ``openai`` object, or an
          :class:`~apache_beam_vllm_dynamo.errors.InferenceError` under ``on_error='return'``.

        Raises:
          InferenceFailedError: Under ``on_error='raise'``, once every element was tried.
          RuntimeFailedError: The server is gone for good.
        """
        builder = self.request_builder(inference_args)
        requests = [builder.build(element) for element in batch]
        with self.asking(model) as client:
            outcomes = client.run(requests, self._limits)
        self.record_outcomes(requests, outcomes)
        self.end_bundle(model)
        failures = [
            (index, outcome.error)
            for index, outcome in enumerate(outcomes)
            if not isinstance(outcome, Answer)
        ]
        if failures and self._on_error == 'raise':
            raise InferenceFailedError(failures, len(batch))
        return [
            self.result_of(element, outcome)
            for element, outcome in zip(batch, outcomes, strict=True)
        ]

    def get_num_bytes(self, batch: Sequence[ElementT]) -> int:
        """The size of a batch's prompts, in bytes of text (eight a token id)."""
        return sum(size_bytes(element) for element in batch)

    def get_metrics_namespace(self) -> str:
        """The namespace of every metric of these handlers."""
        return _metrics.NAMESPACE

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Checks the arguments when the pipeline is built.

        Raises:
          ConfigurationError: One of them cannot work.
        """
        validate_inference_args(inference_args, self._endpoint, under_dynamo=self._use_dynamo)

    def update_model_path(self, model_path: str | None = None) -> None:
        """Refuses a new model from a side input.

        Raises:
          ConfigurationError: There is one. Beam keeps the model before it until the process
            ends, and its server the GPUs.
        """
        if model_path and model_path != self._model_name:
            raise ConfigurationError(
                f'The side input updates the model {self._model_name!r} to {model_path!r}, but '
                'Beam keeps the old model, whose server has the GPUs. Leave out '
                'watch_model_pattern and model_metadata_pcoll, and update the job instead.'
            )

    def share_model_across_processes(self) -> bool:
        """Whether Beam puts the model behind a proxy for all SDK processes.

        They share one server in any case, by :meth:`load_model`. What Beam shares ends with the
        process that has loaded it: the bundles of all others fail, and each next load tries for
        seconds to reach the old address. Without it the others wait until one of them has started
        the server again.

        With ``max_batch_duration_secs`` it is left to Beam all the same. Of all objects that a
        process has for itself Beam keeps only the last, which then would be the model, and not the
        key by which batches are collected over bundles. A ``KeyedModelHandler`` with several models
        does not ask: Beam shares those in any case.
        """
        return self._collects_over_bundles

    # For the transforms of this package, which do without run_inference().

    @property
    def on_error(self) -> OnError:
        """What becomes of an element without an answer."""
        return self._on_error

    @property
    def limits(self) -> RequestLimits:
        """How long and how often an element is tried, whoever shares the server."""
        return self._limits

    def request_builder(self, inference_args: dict[str, Any] | None) -> RequestBuilder:
        """What makes requests of elements."""
        return RequestBuilder(
            self._model_name, self._endpoint, inference_args, under_dynamo=self._use_dynamo
        )

    @contextlib.contextmanager
    def asking(self, model: _VLLMModelServer) -> Iterator[InferenceClient]:
        """The process's client of this server, which looks it up through ``model`` meanwhile."""
        server_id = model.server_id()
        if self._client is None or self._client[0] != server_id:
            if isinstance(model, _VLLMModelServer):  # what Beam shares, it keeps and drops itself
                keep(model)
            make = functools.partial(self._new_client, model)
            self._client = (server_id, client_for(server_id, make))
        found = self._client[1]
        with found.address.through(model):
            yield found.client

    def result_of(self, element: ElementT, outcome: Outcome) -> PredictionResult:
        """What comes out for an element."""
        inference = outcome.response if isinstance(outcome, Answer) else outcome.error
        return PredictionResult(element, inference, self._model_name)

    def record_outcomes(
        self,
        requests: Sequence[PreparedRequest | InferenceError],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Counts the outcomes of requests; for the bundle's thread."""
        self._to_metrics().record(requests, outcomes)
        if self._config is not None and self._config.uses_kv_router:
            _reuse.watch().note(requests, outcomes)

    def end_bundle(self, model: _VLLMModelServer) -> None:
        """Counts what happened to the server meanwhile; for the bundle's thread."""
        self._to_metrics().count(model.take_events())
        self._to_metrics().end_bundle()

    def record_number(self, inferences: int) -> None:
        """Counts inferences where RunInference does not; for the bundle's thread."""
        self._to_metrics().record_number(inferences)

    def record_load(self, took_ms: int) -> None:
        """Records the start of a server where RunInference does not; for the bundle's thread."""
        self._to_metrics().record_load(took_ms)

    def _to_metrics(self) -> _metrics.InferenceMetrics:
        if self._recorded is None:
            self._recorded = _metrics.InferenceMetrics()
        return self._recorded

    def _runtime(self) -> Runtime:
        template = _read_template(self._chat_template_path)
        env = {**os.environ, **self._server_env}
        if self._config is not None:
            if self._endpoint is Endpoint.COMPLETIONS:
                template = template_for_prompts(self._model_name, self._config, env)
            return _DynamoLocalRuntime(
                self._model_name,
                self._config,
                chat_template=template,
                env=env,
                named=self._server_env.keys(),
            )
        timeouts = DynamoRuntimeConfig(**self._timeouts)
        return NativeVLLMRuntime(
            self._model_name,
            self._native_server,
            chat_template=template,
            start_timeout_s=timeouts.start_timeout_secs,
            stop_timeout_s=timeouts.stop_timeout_secs,
            hang_timeout_s=timeouts.hang_timeout_secs,
            env=env,
            named=self._server_env.keys(),
        )

    def _new_client(self, model: _VLLMModelServer, address: Address) -> InferenceClient:
        window = self._max_in_flight or model.window()
        open_prefixes = model.kv_caches() if self._order_by_prefix else 0
        return InferenceClient(address, window, open_prefixes=open_prefixes)

    def _expected_window(self) -> int:
        """The window, as far as it is known before a worker has counted its devices."""
        if self._max_in_flight is not None:
            return self._max_in_flight
        if self._config is None:
            return self._native_server.max_num_seqs
        if isinstance(self._config.engines, EnginesPerWorker):
            return self._config.engines.spec.max_num_seqs
        return sum(spec.max_num_seqs for spec in self._config.engines)

    def _with_batch_sizes(self, batching: dict[str, Any]) -> dict[str, Any]:
        """Batches that fill the window at once, where Beam's own begin with one element."""
        chosen = dict(batching)
        if chosen['max_batch_weight'] is not None or chosen['element_size_fn'] is not None:
            return chosen  # a batch is measured by weight then, not by elements
        window = self._expected_window()
        if chosen['max_batch_size'] is None:
            least = chosen['min_batch_size'] or 1
            chosen['max_batch_size'] = max(MAX_BATCH_WINDOWS * window, least)
        if chosen['min_batch_size'] is None:
            chosen['min_batch_size'] = min(window, chosen['max_batch_size'])
        return chosen

    def _describe_server(self) -> str:
        config = self._config
        if config is None:
            return 'native vLLM'
        if isinstance(config.engines, EnginesPerWorker):
            number = f'an engine for every {config.engines.devices_per_engine} devices'
        else:
            number = f'{len(config.engines)} engines' if len(config.engines) > 1 else '1 engine'
        return f'Dynamo, {number}, {config.router_mode}'


def _config(
    *,
    use_dynamo: bool,
    vllm_server_kwargs: Mapping[str, ServerArgument] | None,
    config: DynamoRuntimeConfig | None,
    frontend_kwargs: Mapping[str, ServerArgument] | None,
    timeouts: dict[str, Any],
) -> DynamoRuntimeConfig | None:
    if not use_dynamo:
        if config is not None or frontend_kwargs is not None:
            given = 'dynamo_runtime_config' if config is not None else 'dynamo_frontend_kwargs'
            raise ConfigurationError(
                f'{given} is given, but use_dynamo is false; pass use_dynamo=True, or leave it out.'
            )
        return None
    if config is None:
        compatible = compatible_config(vllm_server_kwargs or {}, frontend_kwargs or {})
        return dataclasses.replace(compatible, **timeouts)
    if not isinstance(config, DynamoRuntimeConfig):
        raise ConfigurationError(
            f'dynamo_runtime_config is a {type(config).__name__}; it must be a '
            'DynamoRuntimeConfig, such as DynamoRuntimeConfig.for_devices(num_engines=2).'
        )
    if frontend_kwargs is not None:
        raise ConfigurationError(
            'dynamo_frontend_kwargs and dynamo_runtime_config exclude each other; put the flags '
            'into frontend_kwargs of the config.'
        )
    for name in timeouts:
        raise ConfigurationError(
            f'{name} is given beside dynamo_runtime_config; set it in the config.'
        )
    if vllm_server_kwargs:
        raise ConfigurationError(
            'vllm_server_kwargs is given beside dynamo_runtime_config; put the flags into the '
            "vllm_server_kwargs of the config's engines."
        )
    return config


def _check_model_name(model_name: object) -> None:
    if not isinstance(model_name, str) or not model_name.strip():
        raise ConfigurationError(
            f"model_name is {model_name!r}; give a hub name such as 'Qwen/Qwen3-0.6B', or a "
            'directory.'
        )


def _check_template_path(path: object) -> None:
    if path is not None and (not isinstance(path, str) or not path):
        raise ConfigurationError(f'chat_template_path is {path!r}; it must be the path of a file.')


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in ('env_vars', 'large_model', 'model_copies'):
            raise TypeError(f'unexpected keyword argument {name!r}')
    copies = options.get('model_copies')
    if copies is not None and (type(copies) is not int or copies != 1):
        raise ConfigurationError(
            f'model_copies is {copies!r}, but a worker runs one server on all its '
            'devices; leave it out, and list more engines in a DynamoRuntimeConfig instead.'
        )


def _check_no_model_manager() -> None:
    # It alone loads models in processes of their own.
    loader = getattr(multiprocessing.current_process(), '_target', None)
    if getattr(loader, '__module__', None) == multi_process_shared.__name__:
        raise ConfigurationError(
            'RunInference(use_model_manager=True) cannot work with a server: it gives a model one '
            'batch at a time, and ends models by what it thinks they take of one GPU. Leave it '
            'out; steps and processes share a server without it.'
        )


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with FileSystems.open(path) as file:
            return str(file.read().decode('utf-8'))
    except (OSError, ValueError, BeamIOError) as error:
        raise StartError(
            f'chat_template_path is {path!r}, which cannot be read on this worker: {error}. Give a '
            'text file at a path that the workers can open, gs://… for example.'
        ) from error
