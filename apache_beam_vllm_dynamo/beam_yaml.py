"""The handlers in pipelines that are written in Beam YAML.

A pipeline file names this module once, among its providers::

    providers:
      - type: python
        transforms:
          LLMInference: apache_beam_vllm_dynamo.beam_yaml.llm_inference

With that it has the transform :func:`llm_inference` under the name ``LLMInference``, and Beam's own
``RunInference`` (an experimental feature of Beam YAML: ``--yaml_experimental_features=ML``) knows
two more types of model handlers, ``VLLMCompletionsModelHandler`` and ``VLLMChatModelHandler``.
Their config holds the handler's arguments by name, and ``dynamo_runtime_config`` is nested as in
Python::

    model_handler:
      type: VLLMChatModelHandler
      config:
        model_name: Qwen/Qwen3-0.6B
        use_dynamo: true
        dynamo_runtime_config:
          num_engines: 2
          router_mode: kv

What the model is asked is in the field ``prompt`` of each row, or for chat in ``messages`` where
a row has any; ``preprocess`` makes something else of a row. The answer is a row with the fields
of :class:`AnswerRow`, or what ``postprocess`` makes of the ``PredictionResult``.

Needs ``apache-beam[yaml]``; nothing else of this package imports the module.
"""

# Without deferred annotations: Beam reads the types of a row's fields from them.
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple, Optional

import apache_beam as beam
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.typehints.row_type import RowTypeConstraint
from apache_beam.typehints.schemas import named_fields_from_element_type
from apache_beam.yaml.yaml_errors import ErrorHandlingConfig
from apache_beam.yaml.yaml_ml import ModelHandlerProvider
from apache_beam.yaml.yaml_utils import SafeLineLoader

from apache_beam_vllm_dynamo._config_mapping import HandlerKind, handler_from_mapping
from apache_beam_vllm_dynamo.errors import ConfigurationError, InferenceError
from apache_beam_vllm_dynamo.inference import LLMInference, SplitErrors


class AnswerRow(NamedTuple):
    """What became of a prompt, as a row.

    Attributes:
      completion: The text; of chat, the content of the message.
      finish_reason: Why it ended there, such as ``'stop'`` or ``'length'``.
      prompt_tokens: How many tokens the prompt had.
      cached_tokens: How many of them the engine had in its prefix cache.
      completion_tokens: How many tokens were generated.
      error: Why there is no answer; all other fields are null then.
    """

    # Beam's schemas take `str | None` for a field of any type.
    completion: Optional[str]  # noqa: UP045 - as above
    finish_reason: Optional[str]  # noqa: UP045 - as above
    prompt_tokens: Optional[int]  # noqa: UP045 - as above
    cached_tokens: Optional[int]  # noqa: UP045 - as above
    completion_tokens: Optional[int]  # noqa: UP045 - as above
    error: Optional[str]  # noqa: UP045 - as above


def answer_row(result: PredictionResult) -> AnswerRow:
    """The row for a result of either handler."""
    response: Any = result.inference
    if isinstance(response, InferenceError):
        return AnswerRow(None, None, None, None, None, str(response))
    choice, usage = response.choices[0], response.usage
    details = usage.prompt_tokens_details
    return AnswerRow(
        completion=choice.message.content if hasattr(choice, 'message') else choice.text,
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens if details else None) or 0,
        completion_tokens=usage.completion_tokens,
        error=None,
    )


def completion_element(row: Any) -> Any:
    """What the completions handler is asked for a row: its ``prompt``."""
    fields = row._asdict()
    _check_fields(fields, VLLMCompletionsProvider.fields)
    return fields['prompt']


def chat_element(row: Any) -> Any:
    """What the chat handler is asked for a row: its ``messages``, or its ``prompt`` alone."""
    fields = row._asdict()
    _check_fields(fields, VLLMChatProvider.fields)
    messages = fields.get('messages')
    # Where some rows have none, the field is null, or of a file that pandas read no number.
    if isinstance(messages, (list, tuple)) or 'prompt' not in fields:
        return _plain(messages)
    return [{'role': 'user', 'content': fields['prompt']}]


class _VLLMProvider(ModelHandlerProvider):
    """A handler out of its YAML config, with what goes before and after it.

    Attributes:
      preprocess: From a row to the handler's element.
      postprocess: From a ``PredictionResult`` to what comes out.
      needed_fields: The fields of which a row must have one.
    """

    kind: ClassVar[HandlerKind]
    fields: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        preprocess: dict[str, str] | None = None,
        postprocess: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(handler_from_mapping(self.kind, arguments), preprocess, postprocess)
        self.preprocess: Callable[[Any], Any] = self._preprocess_fn
        self.postprocess: Callable[[Any], Any] = self._postprocess_fn
        self.needed_fields = self.fields if preprocess is None else ()
        self._output_type: Any = AnswerRow if postprocess is None else Any

    def inference_output_type(self) -> Any:
        return self._output_type

    @staticmethod
    def default_postprocess_fn() -> Callable[[PredictionResult], AnswerRow]:
        return answer_row

    @staticmethod
    def validate(model_handler_spec: object) -> None:
        """Everything was checked when the handler was made."""


@ModelHandlerProvider.register_handler_type('VLLMCompletionsModelHandler')
class VLLMCompletionsProvider(_VLLMProvider):
    """``VLLMCompletionsModelHandler`` for ``RunInference`` and ``LLMInference``."""

    kind = 'completions'
    fields = ('prompt',)

    @staticmethod
    def default_preprocess_fn() -> Callable[[Any], Any]:
        return completion_element


@ModelHandlerProvider.register_handler_type('VLLMChatModelHandler')
class VLLMChatProvider(_VLLMProvider):
    """``VLLMChatModelHandler`` for ``RunInference`` and ``LLMInference``."""

    kind = 'chat'
    fields = ('messages', 'prompt')

    @staticmethod
    def default_preprocess_fn() -> Callable[[Any], Any]:
        return chat_element


_PROVIDERS: Mapping[str, type[_VLLMProvider]] = {
    'VLLMCompletionsModelHandler': VLLMCompletionsProvider,
    'VLLMChatModelHandler': VLLMChatProvider,
}


@beam.ptransform.ptransform_fn
def llm_inference(
    pcoll: beam.PCollection[Any],
    model_handler: dict[str, Any],
    inference_tag: str = 'inference',
    inference_args: dict[str, Any] | None = None,
    *,
    error_handling: ErrorHandlingConfig | None = None,
) -> Any:
    """Asks a model about each row, and emits each row with its answer when that is there.

    Takes what ``RunInference`` of Beam YAML takes, and ``error_handling``: with it, rows without
    an answer leave through an output of their own in Beam YAML's format for errors, as do
    those for which ``preprocess`` or ``postprocess`` raises an exception.

    Args:
      pcoll: The rows.
      model_handler: The ``type`` and the ``config`` of the handler.
      inference_tag: The field of the answer.
      inference_args: Arguments of each request, such as ``max_tokens``.
      error_handling: Its ``output`` names the output of the rows without an answer.

    Raises:
      ConfigurationError: The transform cannot work.
    """
    errors = _Errors(SafeLineLoader.strip_metadata(error_handling))
    provider = _provider(SafeLineLoader.strip_metadata(model_handler), splits=errors.wanted)
    input_type: Any = pcoll.element_type
    fields: list[tuple[str, Any]] = named_fields_from_element_type(input_type)
    names = [name for name, _ in fields]
    _check_fields(names, provider.needed_fields)
    if inference_tag in names:
        raise ConfigurationError(
            f'inference_tag is {inference_tag!r}, but the rows have a field of that name; choose '
            'another for the answer.'
        )
    row_type = RowTypeConstraint.from_fields(
        [*fields, (inference_tag, provider.inference_output_type())]
    )
    asked = errors.map(
        pcoll, 'Preprocess', lambda row: (row, provider.preprocess(row)), row_of=_itself
    )
    handler: Any = KeyedModelHandler(provider.underlying_handler())
    results = errors.split(asked | LLMInference(handler, inference_args))
    answers = errors.map(
        results,
        'Postprocess',
        lambda pair: beam.Row(
            **pair[0]._asdict(), **{inference_tag: provider.postprocess(pair[1])}
        ),
        row_of=operator.itemgetter(0),
    )
    answers.element_type = row_type
    return errors.beside(answers, input_type)


class _Errors:
    """Where rows go that have no answer: nowhere, or to an output of their own."""

    def __init__(self, error_handling: Any) -> None:
        if error_handling is not None and set(error_handling) != {'output'}:
            raise ConfigurationError(
                f'error_handling is {error_handling!r}; it takes the name of an output: '
                '{output: failed}.'
            )
        self.wanted = error_handling is not None
        self._output = error_handling['output'] if error_handling is not None else ''
        self._collected: list[beam.PCollection[Any]] = []

    def map(
        self,
        pcoll: beam.PCollection[Any],
        label: str,
        function: Callable[[Any], Any],
        row_of: Callable[[Any], Any],
    ) -> beam.PCollection[Any]:
        """Applies ``function``, and puts the rows aside for which it raises."""
        if not self.wanted:
            mapped: beam.PCollection[Any] = pcoll | label >> beam.Map(function)
            return mapped
        good: beam.PCollection[Any]
        good, bad = pcoll | label >> beam.Map(function).with_exception_handling()
        self._collected.append(bad | f'{label}Errors' >> beam.Map(_error_of_exception, row_of))
        return good

    def split(self, results: beam.PCollection[Any]) -> beam.PCollection[Any]:
        """Puts the failed results aside."""
        if not self.wanted:
            return results
        answered: beam.PCollection[Any]
        answered, failed = results | SplitErrors()
        self._collected.append(failed | 'Errors' >> beam.Map(_error_of_result))
        return answered

    def beside(self, answers: beam.PCollection[Any], row_type: Any) -> Any:
        """The answers, and where it is wanted the output beside them."""
        if not self.wanted:
            return answers
        error_type = RowTypeConstraint.from_fields(
            [('element', row_type), ('msg', str), ('stack', str)]
        )
        errors = self._collected | beam.Flatten()
        errors.element_type = error_type
        return {'good': answers, self._output: errors}


def _provider(model_handler: Any, *, splits: bool) -> _VLLMProvider:
    if not isinstance(model_handler, Mapping) or set(model_handler) != {'type', 'config'}:
        raise ConfigurationError(
            'model_handler must have a type and a config, and nothing else: {type: '
            'VLLMChatModelHandler, config: {model_name: …}}.'
        )
    kind, config = model_handler['type'], model_handler['config']
    if kind not in _PROVIDERS:
        raise ConfigurationError(
            f'the type of model_handler is {kind!r}; LLMInference runs '
            f'{" and ".join(_PROVIDERS)}, and RunInference others.'
        )
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"the config of model_handler is {config!r}; it holds the handler's arguments by name: "
            '{model_name: …}.'
        )
    if splits and config.get('on_error', 'return') != 'return':
        raise ConfigurationError(
            f'on_error is {config["on_error"]!r}, but with error_handling no row fails another; '
            'leave one of them out.'
        )
    return _PROVIDERS[kind](**dict(config) | ({'on_error': 'return'} if splits else {}))


def _check_fields(names: Collection[str], needed: Collection[str]) -> None:
    if needed and not set(needed) & set(names):
        raise ConfigurationError(
            f'the rows have the fields {", ".join(names)}, but not {" or ".join(needed)}, which is '
            "what the model is asked; name a field so, or add a preprocess to the handler's config."
        )


def _plain(value: Any) -> Any:
    """Rows within a value as dicts, without the fields that rows must have and dicts need not."""
    if hasattr(value, '_asdict'):
        value = {name: field for name, field in value._asdict().items() if field is not None}
    if isinstance(value, Mapping):
        return {key: _plain(field) for key, field in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _error_of_exception(
    failure: tuple[Any, tuple[type, str, list[str]]], row_of: Callable[[Any], Any]
) -> beam.Row:
    element, (_, text, trace) = failure
    return beam.Row(element=row_of(element), msg=text, stack=''.join(trace))


def _error_of_result(failure: tuple[Any, PredictionResult]) -> beam.Row:
    row, result = failure
    return beam.Row(element=row, msg=str(result.inference), stack='')


def _itself(row: Any) -> Any:
    return row
