"""The two model handlers: Beam's contract, kept with vLLM servers on the worker.

Both take the arguments of Beam 2.77's own vLLM handlers
(``apache_beam.ml.inference.vllm_inference``) and return the same results, ``openai`` objects
inside ``PredictionResult``; a pipeline moves here by changing an import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo._base_handler import OnError, VLLMModelHandler
from apache_beam_vllm_dynamo._requests import Endpoint
from apache_beam_vllm_dynamo._retry import (
    DEFAULT_ELEMENT_TIMEOUT_S,
    DEFAULT_EXCERPT_CHARS,
    DEFAULT_MAX_RETRIES,
    DEFAULT_MAX_WAIT_S,
    DEFAULT_REQUEST_TIMEOUT_S,
)
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.messages import ChatElement, CompletionElement


class VLLMCompletionsModelHandler(VLLMModelHandler[CompletionElement]):
    """Completes prompts with a vLLM server that it runs on the worker.

    An element is a string, a list of token ids, or a
    :class:`~apache_beam_vllm_dynamo.messages.CompletionRequest`.

    Args:
      model_name: The model, a hub name or a directory that the worker can read.
      vllm_server_kwargs: Flags of vLLM's server, or of ``dynamo.vllm`` with ``use_dynamo``,
        without the leading dashes: ``{'max-num-seqs': 32, 'enforce-eager': True}``; see the
        ``vllm_server_kwargs`` of :class:`~apache_beam_vllm_dynamo.config.DynamoVLLMEngineSpec`.
      use_dynamo: Serve through NVIDIA Dynamo. Alone: one engine, round-robin, no KV events.
      dynamo_runtime_config: The engines and the router; needs ``use_dynamo=True``. The
        engines' flags are then in their specs, and ``vllm_server_kwargs`` stays empty.
      dynamo_frontend_kwargs: Flags of ``dynamo.frontend``, for ``use_dynamo=True`` without a
        ``dynamo_runtime_config``.
      min_batch_size: The least elements of a batch; unset, as many as the engines run at once.
      max_batch_size: The most elements of a batch; unset, four times that.
      max_batch_duration_secs: How long a batch may wait for elements, in streaming, in seconds;
        unset, a batch ends with its bundle.
      max_batch_weight: The largest weight of a batch, in the unit of ``element_size_fn``, which it
        needs. With either of them batches are measured by weight, and the two sizes above are
        those of Beam where they are unset.
      element_size_fn: Gives the weight of an element; unset, each counts 1.
      batch_length_fn: Gives the length of an element, so that a batch holds elements of like
        lengths.
      batch_bucket_boundaries: The lengths, ascending, at which one kind of batch ends and the next
        begins; needs ``batch_length_fn``.
      on_error: What becomes of an element without an answer: ``'raise'`` fails the batch once
        all its elements were tried; ``'return'`` puts an ``InferenceError`` in its result.
      max_in_flight: How many requests may be in flight at once in one process; unset, as many
        as the engines run at once.
      order_by_prefix: Send what waits for a place so that prompts which begin alike follow each
        other, instead of in the order in which it came. The order of results stays.
      max_retries: How often an element is sent again after failures of its own, such as a
        malformed response; 6 unless given. 0 sends each once. After three deaths of its server
        or engine it is sent once more at most, however large this is.
      max_wait_secs: How long an element waits for a server that is overloaded or away, in
        seconds, in all; 600 unless given.
      request_timeout_secs: How long one attempt may take, in seconds; 600 unless given.
      element_timeout_secs: How long an element may take in all, in seconds, from its first
        sending on; 1,800 unless given.
      start_timeout_secs: How long the start of the server may take, in seconds, model load
        included; with a ``dynamo_runtime_config`` it is a field of that. Unset, 1,800.
      hang_timeout_secs: How long an engine, or rank of the native server, may neither bring
        forth a token nor answer a request for one, in seconds, before it is replaced; with a
        ``dynamo_runtime_config`` it is a field of that, and explained there. Unset, 120.
      error_excerpt_chars: How much of the server's message an error keeps, in characters; it may
        repeat a part of the prompt. 200 unless given; 0 keeps nothing.
      **kwargs: ``env_vars``: environment variables for the server's processes alone;
        ``large_model`` and ``model_copies``, which change nothing: a worker runs one server.

    Raises:
      ConfigurationError: An argument cannot work.
    """

    _endpoint = Endpoint.COMPLETIONS

    def __init__(  # noqa: PLR0913 - Beam's handlers take as many, and a few are ours
        self,
        model_name: str,
        vllm_server_kwargs: Mapping[str, ServerArgument] | None = None,
        *,
        use_dynamo: bool = False,
        dynamo_runtime_config: DynamoRuntimeConfig | None = None,
        dynamo_frontend_kwargs: Mapping[str, ServerArgument] | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_duration_secs: int | None = None,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[Any], int] | None = None,
        batch_length_fn: Callable[[Any], int] | None = None,
        batch_bucket_boundaries: list[int] | None = None,
        on_error: OnError = 'raise',
        max_in_flight: int | None = None,
        order_by_prefix: bool = True,
        max_retries: int = DEFAULT_MAX_RETRIES,
        max_wait_secs: float = DEFAULT_MAX_WAIT_S,
        request_timeout_secs: float = DEFAULT_REQUEST_TIMEOUT_S,
        element_timeout_secs: float = DEFAULT_ELEMENT_TIMEOUT_S,
        start_timeout_secs: float | None = None,
        hang_timeout_secs: float | None = None,
        error_excerpt_chars: int = DEFAULT_EXCERPT_CHARS,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model_name,
            vllm_server_kwargs,
            None,
            use_dynamo=use_dynamo,
            dynamo_runtime_config=dynamo_runtime_config,
            dynamo_frontend_kwargs=dynamo_frontend_kwargs,
            on_error=on_error,
            max_in_flight=max_in_flight,
            order_by_prefix=order_by_prefix,
            max_retries=max_retries,
            max_wait_secs=max_wait_secs,
            request_timeout_secs=request_timeout_secs,
            element_timeout_secs=element_timeout_secs,
            start_timeout_secs=start_timeout_secs,
            hang_timeout_secs=hang_timeout_secs,
            error_excerpt_chars=error_excerpt_chars,
            batching={
                'min_batch_size': min_batch_size,
                'max_batch_size': max_batch_size,
                'max_batch_duration_secs': max_batch_duration_secs,
                'max_batch_weight': max_batch_weight,
                'element_size_fn': element_size_fn,
                'batch_length_fn': batch_length_fn,
                'batch_bucket_boundaries': batch_bucket_boundaries,
            },
            options=kwargs,
        )


class VLLMChatModelHandler(VLLMModelHandler[ChatElement]):
    """Continues conversations with a vLLM server that it runs on the worker.

    An element is a list of messages
    (:class:`~apache_beam_vllm_dynamo.messages.OpenAIChatMessage` or dicts of the OpenAI
    schema), or a :class:`~apache_beam_vllm_dynamo.messages.ChatRequest`.

    Takes the arguments of :class:`VLLMCompletionsModelHandler`, with the same meaning, and one more
    in the second place:

    Args:
      chat_template_path: A chat template over the model's own: a file at any path that Beam
        can read on the worker, ``gs://…`` too. Simulated engines do not look at it.

    Raises:
      ConfigurationError: An argument cannot work.
    """

    _endpoint = Endpoint.CHAT

    def __init__(  # noqa: PLR0913 - Beam's handlers take as many, and a few are ours
        self,
        model_name: str,
        chat_template_path: str | None = None,
        vllm_server_kwargs: Mapping[str, ServerArgument] | None = None,
        *,
        use_dynamo: bool = False,
        dynamo_runtime_config: DynamoRuntimeConfig | None = None,
        dynamo_frontend_kwargs: Mapping[str, ServerArgument] | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_batch_duration_secs: int | None = None,
        max_batch_weight: int | None = None,
        element_size_fn: Callable[[Any], int] | None = None,
        batch_length_fn: Callable[[Any], int] | None = None,
        batch_bucket_boundaries: list[int] | None = None,
        on_error: OnError = 'raise',
        max_in_flight: int | None = None,
        order_by_prefix: bool = True,
        max_retries: int = DEFAULT_MAX_RETRIES,
        max_wait_secs: float = DEFAULT_MAX_WAIT_S,
        request_timeout_secs: float = DEFAULT_REQUEST_TIMEOUT_S,
        element_timeout_secs: float = DEFAULT_ELEMENT_TIMEOUT_S,
        start_timeout_secs: float | None = None,
        hang_timeout_secs: float | None = None,
        error_excerpt_chars: int = DEFAULT_EXCERPT_CHARS,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model_name,
            vllm_server_kwargs,
            chat_template_path,
            use_dynamo=use_dynamo,
            dynamo_runtime_config=dynamo_runtime_config,
            dynamo_frontend_kwargs=dynamo_frontend_kwargs,
            on_error=on_error,
            max_in_flight=max_in_flight,
            order_by_prefix=order_by_prefix,
            max_retries=max_retries,
            max_wait_secs=max_wait_secs,
            request_timeout_secs=request_timeout_secs,
            element_timeout_secs=element_timeout_secs,
            start_timeout_secs=start_timeout_secs,
            hang_timeout_secs=hang_timeout_secs,
            error_excerpt_chars=error_excerpt_chars,
            batching={
                'min_batch_size': min_batch_size,
                'max_batch_size': max_batch_size,
                'max_batch_duration_secs': max_batch_duration_secs,
                'max_batch_weight': max_batch_weight,
                'element_size_fn': element_size_fn,
                'batch_length_fn': batch_length_fn,
                'batch_bucket_boundaries': batch_bucket_boundaries,
            },
            options=kwargs,
        )
