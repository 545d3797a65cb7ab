"""What the workers of a benchmark's pipeline run: from a line of input to a line of output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult, RunInference

from apache_beam_vllm_dynamo import InferenceError, LLMInference, VLLMCompletionsModelHandler
from apache_beam_vllm_dynamo._responses import Answer, Outcome
from benchmarks._document_text import answers_with

Row = dict[str, Any]

# Of a prompt in a file that says nothing about cohorts.
ONLY_COHORT = 'all'
_SHOWN_CHARACTERS = 80  # of a wrong value


class TimedHandler(VLLMCompletionsModelHandler):
    """The handler, with the times of each request beside its answer."""

    def result_of(self, element: Any, outcome: Outcome) -> PredictionResult:
        """A pair in place of the answer alone: it, and the times in milliseconds."""
        inference = outcome.response if isinstance(outcome, Answer) else outcome.error
        times = {
            'latency_ms': round(outcome.latency_s * 1000, 3),
            'queue_ms': round(outcome.queue_s * 1000, 3),
            'completed_at_ms': outcome.completed_at_ms,
            'attempts': outcome.attempts,
        }
        return PredictionResult(element, (inference, times), self._model_name)


class Ask(beam.PTransform[Any, Any]):
    """Lines of input to lines of output.

    Args:
      handler: The handler of the arm.
      inference_args: For all prompts.
      batched: Whether the handler's batches are made; else each request leaves as soon as it can.
      constants: What every line of output says, such as the arm and the run.
      labels: The words that an answer should be one of; empty if it may be anything.
    """

    def __init__(
        self,
        handler: TimedHandler,
        inference_args: dict[str, Any],
        *,
        batched: bool,
        constants: Row,
        labels: Collection[str],
    ) -> None:
        super().__init__()
        self._handler = handler
        self._inference_args = inference_args
        self._batched = batched
        self._constants = constants
        self._labels = labels

    def expand(self, lines: beam.PCollection[str]) -> beam.PCollection[str]:
        infer = RunInference if self._batched else LLMInference
        constants, labels = self._constants, self._labels
        encoded: beam.PCollection[str] = (
            lines
            | 'SkipBlank' >> beam.Filter(str.strip)
            | 'Parse' >> beam.Map(parse_prompt)
            | 'Key' >> beam.Map(lambda row: (row, row.pop('prompt')))
            | 'Ask' >> infer(KeyedModelHandler(self._handler), inference_args=self._inference_args)
            | 'Record' >> beam.Map(lambda keyed: keyed[0] | constants | to_record(keyed[1], labels))
            | 'Encode' >> beam.Map(json.dumps)
        )
        return encoded


def parse_prompt(line: str) -> Row:
    """The ``id``, ``family``, ``cohort`` and ``prompt`` on a line; all but the last may be absent.

    Raises:
      ValueError: It is no JSON object with a prompt.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'it is no JSON: {error}') from error
    if not isinstance(found, dict):
        raise ValueError(f'it is {_shown(found)}, not a JSON object')  # noqa: TRY004 - as all others
    prompt = found.get('prompt')
    if not isinstance(prompt, str) or not prompt:
        given = f'is {_shown(prompt)}' if 'prompt' in found else 'is missing'
        raise ValueError(f'"prompt" {given}; it must be a text that is not empty')
    encoded = _encoded(prompt, 'prompt')
    return {
        'id': _name(found, 'id') or hashlib.sha256(encoded).hexdigest()[:16],
        'family': _name(found, 'family'),
        'cohort': _name(found, 'cohort') or ONLY_COHORT,
        'prompt': prompt,
    }


def to_record(result: PredictionResult, labels: Collection[str]) -> Row:
    """What became of a prompt; the same fields for every one."""
    answered: Any = result.inference  # what TimedHandler has put there
    inference, times = answered
    record: Row = dict.fromkeys((
        'text', 'parses', 'finish_reason', 'prompt_tokens', 'cached_tokens', 'completion_tokens',
        'engine', 'ttft_ms',
    ))  # fmt: skip
    record |= times
    if isinstance(inference, InferenceError):
        return record | {'error': str(inference)}
    choice, usage = inference.choices[0], inference.usage
    details = usage.prompt_tokens_details
    # What Dynamo adds for those who ask; vLLM's own server has nothing like it.
    extra = getattr(inference, 'nvext', None) or {}
    engine = (extra.get('worker_id') or {}).get('decode_worker_id')
    return record | {
        'text': choice.text,
        'parses': answers_with(choice.text, labels) if labels else None,
        'finish_reason': choice.finish_reason,
        'prompt_tokens': usage.prompt_tokens,
        'cached_tokens': (details.cached_tokens if details else None) or 0,
        'completion_tokens': usage.completion_tokens,
        'engine': None if engine is None else str(engine),
        'ttft_ms': (extra.get('timing') or {}).get('ttft_ms'),
        'error': None,
    }


def _name(found: Row, key: str) -> str | None:
    value = found.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        _encoded(value, key)
        return value or None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f'"{key}" is {_shown(value)}; it must be a text or a number')


def _encoded(text: str, key: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair
        raise ValueError(f'"{key}" holds what is no text: {error.reason}') from error


def _shown(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else f'{shown[:_SHOWN_CHARACTERS]}…'
