"""The transform without a wait for the slowest of a batch, and the split of results from errors.

``RunInference`` hands a batch to the handler and waits for all of it, and a runner often has
one thread for it; while the last prompts of a batch are answered, the engines have little to
do. :class:`LLMInference` makes no batches: it keeps the window of requests full across all
elements of a bundle, and emits each result when it is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import (
    KeyedModelHandler,
    MaybeKeyedModelHandler,
    ModelHandler,
    PredictionResult,
)
from apache_beam.utils.shared import Shared
from apache_beam.utils.windowed_value import WindowedValue

from apache_beam_vllm_dynamo._base_handler import VLLMModelHandler
from apache_beam_vllm_dynamo._client import RequestStream
from apache_beam_vllm_dynamo._model_server import _VLLMModelServer
from apache_beam_vllm_dynamo._requests import PreparedRequest, RequestBuilder
from apache_beam_vllm_dynamo._responses import Answer, Outcome
from apache_beam_vllm_dynamo.errors import (
    ConfigurationError,
    InferenceError,
    InferenceFailedError,
)

# As many again as are in flight wait in the client, so that the window is full whenever the
# bundle's thread is busy elsewhere, with reading the next elements or with their consumers.
PENDING_WINDOWS = 2
# To be ordered by their prefixes more must wait: from where prompts come in no order, those that
# wait are all that can meet.
PENDING_TO_ORDER = 10_000
# Of all bundles of a process together: what waits must not fill a worker's memory.
WAITING_BYTES = 256 * 2**20


class LLMInference(beam.PTransform[Any, Any]):
    """Asks a model about each element, and emits each result when it is there.

    Takes what ``RunInference`` takes and gives what it gives: one ``PredictionResult`` an
    element, with the element's timestamp, window and pane, in no order. A handler inside a
    ``KeyedModelHandler`` takes ``(key, element)`` and gives ``(key, PredictionResult)``;
    functions of ``with_preprocess_fn()`` and ``with_postprocess_fn()`` are applied before and
    after. A bundle ends when each of its elements has a result, so that a runner commits
    nothing that was not answered.

    With sliding windows an element is asked about once for each of its windows, as in
    ``RunInference``; window after the inference instead.

    Args:
      model_handler: One of this package's handlers, as it is or wrapped as above.
      inference_args: Keyword arguments of the ``openai`` client's ``create()``, for all
        elements.
      model_identifier: What the job graph calls the model, as in ``RunInference``. Which server
        is asked does not depend on it: all with equal settings share one on each worker.

    Raises:
      ConfigurationError: The handler or an argument cannot work.
    """

    def __init__(
        self,
        model_handler: ModelHandler[Any, Any, Any],
        inference_args: dict[str, Any] | None = None,
        *,
        model_identifier: str | None = None,
    ) -> None:
        super().__init__()
        self._model_handler = model_handler
        self._unwrapped = unwrap(model_handler)
        self._unwrapped.handler.validate_inference_args(inference_args)
        self._inference_args = inference_args
        self._model_identifier = model_identifier or uuid.uuid4().hex

    def expand(self, elements: beam.PCollection[Any]) -> beam.PCollection[Any]:
        """Applies the functions before, the inference and the functions after."""
        elements = _mapped(elements, self._model_handler.get_preprocess_fns(), 'Preprocess')
        hints = self._model_handler.get_resource_hints()
        infer = beam.ParDo(_InferenceDoFn(self._unwrapped, self._inference_args))
        results = elements | 'Infer' >> infer.with_resource_hints(**hints)
        return _mapped(results, self._model_handler.get_postprocess_fns(), 'Postprocess')

    def annotations(self) -> dict[str, Any]:
        """What a job graph says of the transform."""
        return {
            'model_handler': str(self._unwrapped.handler),
            'model_identifier': self._model_identifier,
            **super().annotations(),
        }


class SplitErrors(beam.PTransform[Any, Any]):
    """Splits results from errors, element by element.

    For what a handler with ``on_error='return'`` gives, through ``RunInference`` or
    :class:`LLMInference`, keyed or not::

        answered, failed = results | SplitErrors()

    The two outputs are also attributes of these names. ``failed`` holds the
    ``PredictionResult`` whose ``inference`` is an
    :class:`~apache_beam_vllm_dynamo.errors.InferenceError`, each with the element that it is
    of: a dead-letter output of single elements.
    """

    def expand(self, results: beam.PCollection[Any]) -> Any:
        """Gives the outputs ``answered`` and ``failed``."""
        return results | beam.ParDo(_split).with_outputs('failed', main='answered')


@dataclasses.dataclass(frozen=True)
class Unwrapped:
    """One of this package's handlers, out of Beam's wrappers.

    Attributes:
      handler: The handler itself.
      has_key: Whether an element is a key and what the model is asked about.
    """

    handler: VLLMModelHandler[Any]
    has_key: Callable[[object], bool]


def unwrap(model_handler: object) -> Unwrapped:
    """Takes Beam's wrappers off a handler.

    Raises:
      ConfigurationError: It is none of this package's, or wrapped in a way that needs batches
        or several models.
    """
    handler = model_handler
    has_key: Callable[[object], bool] = _never
    # Beam has no public way to what a wrapper wraps.
    while not isinstance(handler, VLLMModelHandler):
        if isinstance(handler, ModelHandler) and handler.should_skip_batching():
            raise ConfigurationError(
                'The handler is with_no_batching(), but LLMInference makes no batches: leave '
                'that out and pass the elements one by one, or use RunInference.'
            )
        if isinstance(handler, (KeyedModelHandler, MaybeKeyedModelHandler)):
            has_key = _always if isinstance(handler, KeyedModelHandler) else _is_tuple
            inner = getattr(handler, '_unkeyed', None)
            if inner is None:
                raise ConfigurationError(
                    'The KeyedModelHandler chooses among several models by key, which '
                    'LLMInference does not: partition the elements and apply one LLMInference '
                    'to each part, or use RunInference.'
                )
        else:
            inner = getattr(handler, '_base', None)
        if not isinstance(inner, ModelHandler):
            raise ConfigurationError(
                f'LLMInference runs the handlers of this package, not a {type(handler).__name__}: '
                'use RunInference for others.'
            )
        handler = inner
    return Unwrapped(handler, has_key)


@dataclasses.dataclass(slots=True)
class _Asked:
    """What a result is made of, beside the answer."""

    value: WindowedValue
    example: Any
    index: int
    request: PreparedRequest | InferenceError


class _InferenceDoFn(beam.DoFn):
    """Keeps the window full across the elements of a bundle."""

    def __init__(self, unwrapped: Unwrapped, inference_args: dict[str, Any] | None) -> None:
        super().__init__()
        self._handler = unwrapped.handler
        self._has_key = unwrapped.has_key
        self._inference_args = inference_args
        self._of_this_process = Shared()
        self._load_ms: int | None = None
        self._model: _VLLMModelServer | None = None
        self._builder: RequestBuilder | None = None
        self._asking = contextlib.ExitStack()
        self._stream: RequestStream[_Asked] | None = None
        self._asked = 0
        self._failures: list[tuple[int, InferenceError]] = []

    def setup(self) -> None:
        """Finds the worker's server, or starts it."""
        self._handler.set_environment_vars()
        self._model = self._of_this_process.acquire(self._load)
        self._builder = self._handler.request_builder(self._inference_args)

    def start_bundle(self) -> None:
        """Opens a stream of requests."""
        self._close()  # a bundle that failed has no end
        self._asked = 0
        self._failures = []
        assert self._model is not None
        client = self._asking.enter_context(self._handler.asking(self._model))
        self._stream = client.stream(
            PENDING_WINDOWS * client.window,
            WAITING_BYTES,
            max_pending_to_order=PENDING_TO_ORDER,
            limits=self._handler.limits,
        )

    def process(
        self, element: Any, value: Any = beam.DoFn.WindowedValueParam
    ) -> list[WindowedValue] | None:
        """Sends an element's request, and emits what was answered meanwhile."""
        stream, builder = self._stream, self._builder
        assert stream is not None
        assert builder is not None
        example = _value_of(element) if self._has_key(element) else element
        request = builder.build(example)
        stream.put(request, _Asked(value, example, self._asked, request))
        self._asked += 1
        return self._results(list(stream.ready()))

    def finish_bundle(self) -> Iterator[WindowedValue]:
        """Emits the results of all elements that have none yet, waiting for them.

        Raises:
          InferenceFailedError: Elements have no answer, under ``on_error='raise'``.
        """
        stream, model = self._stream, self._model
        assert stream is not None
        assert model is not None
        for done in stream.drain():
            yield from self._results([done, *stream.ready()]) or ()
        self._handler.end_bundle(model)
        if self._load_ms is not None:
            self._handler.record_load(self._load_ms)
            self._load_ms = None
        if self._failures:
            raise InferenceFailedError(self._failures, self._asked)

    def teardown(self) -> None:
        """Gives up what is on its way."""
        self._close()

    def _results(self, done: list[tuple[_Asked, Outcome]]) -> list[WindowedValue] | None:
        if not done:
            return None
        outcomes = [outcome for _, outcome in done]
        self._handler.record_outcomes([asked.request for asked, _ in done], outcomes)
        self._handler.record_number(len(outcomes))
        results = []
        for asked, outcome in done:
            if not isinstance(outcome, Answer) and self._handler.on_error == 'raise':
                # What follows expects answers; told at the end, it is one error for all of them.
                self._failures.append((asked.index, outcome.error))
                continue
            result: Any = self._handler.result_of(asked.example, outcome)
            if self._has_key(asked.value.value):
                result = (asked.value.value[0], result)
            results.append(asked.value.with_value(result))
        return results

    def _load(self) -> _VLLMModelServer:
        began = time.monotonic()
        model = self._handler.load_model()
        self._load_ms = round((time.monotonic() - began) * 1000)
        return model

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._asking.close()


def _mapped(
    elements: beam.PCollection[Any], functions: Iterable[Callable[[Any], Any]], label: str
) -> beam.PCollection[Any]:
    for index, function in enumerate(functions):
        elements = elements | f'{label}-{index}' >> beam.Map(function)
    return elements


def _split(result: Any) -> Iterator[Any]:
    keyed = isinstance(result, tuple) and not isinstance(result, PredictionResult)
    prediction = result[1] if keyed and len(result) == 2 else result  # noqa: PLR2004 - a pair
    if not isinstance(prediction, PredictionResult):
        raise ConfigurationError(
            f'SplitErrors got a {type(result).__name__}: it takes PredictionResults, keyed or '
            'not, so it comes before whatever makes something else of them.'
        )
    failed = isinstance(prediction.inference, InferenceError)
    yield beam.pvalue.TaggedOutput('failed', result) if failed else result


def _value_of(pair: Any) -> Any:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - a pair
        length = f' of {len(pair)}' if isinstance(pair, (tuple, list)) else ''
        raise ConfigurationError(
            f'An element is a {type(pair).__name__}{length}, but the handler is keyed: each must '
            'be a pair of a key and what the model is asked about. Make pairs, or pass the handler '
            'without its KeyedModelHandler.'
        )
    return pair[1]


def _never(_: object) -> bool:
    return False


def _always(_: object) -> bool:
    return True


def _is_tuple(element: object) -> bool:
    return isinstance(element, tuple)
