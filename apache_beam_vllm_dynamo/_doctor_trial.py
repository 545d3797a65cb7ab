"""A start of the whole stack on simulated engines, and its end."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from apache_beam_vllm_dynamo._doctor_report import Check, failed_by
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import ConfigurationError, StartError

START_BOUND_S = 60.0  # two seconds on an idle machine

# The least that Dynamo takes for a model: nothing is computed with it.
_WORDS = ('<unk>', '<s>', '</s>', 'hello')
_MODEL_CONFIG = {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'vocab_size': len(_WORDS),
    'hidden_size': 64,
    'intermediate_size': 64,
    'num_attention_heads': 1,
    'num_hidden_layers': 1,
    'max_position_embeddings': 4096,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
_TOKENIZER = {
    'version': '1.0',
    'added_tokens': [],
    'pre_tokenizer': {'type': 'Whitespace'},
    'model': {
        'type': 'WordLevel',
        'vocab': {word: number for number, word in enumerate(_WORDS)},
        'unk_token': '<unk>',
    },
}
_TOKENIZER_CONFIG = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'unk_token': '<unk>',
    'bos_token': '<s>',
    'eos_token': '</s>',
    'chat_template': '{% for message in messages %}{{ message.content }}{% endfor %}',
}


def try_start(subject: Subject, env: Mapping[str, str]) -> Check:
    """Starts etcd, broker, frontend and simulated engines in place of the config's, and ends them.

    It is whole when a request for one token was answered.
    """
    name = 'trial start'
    if subject.config is None:
        return Check.warning(
            name,
            "vLLM's own server has no simulated engine, so nothing was started",
            'Leave --start out',
        )
    config = dataclasses.replace(
        subject.config, engine_kind='simulated', start_timeout_secs=START_BOUND_S
    )
    with tempfile.TemporaryDirectory(prefix='doctor-') as scratch:
        write_model(Path(scratch))
        try:
            return _start(name, scratch, config, env)
        except (StartError, ConfigurationError) as error:
            return failed_by(name, error)


def write_model(directory: Path) -> None:
    """A model of no use but to start simulated engines with."""
    for file, content in (
        ('config.json', _MODEL_CONFIG),
        ('tokenizer.json', _TOKENIZER),
        ('tokenizer_config.json', _TOKENIZER_CONFIG),
    ):
        (directory / file).write_text(json.dumps(content), encoding='utf-8')


def _start(name: str, model: str, config: DynamoRuntimeConfig, env: Mapping[str, str]) -> Check:
    runtime = _DynamoLocalRuntime(model, config, env=env)
    began = time.monotonic()
    try:
        runtime.start()
        took_s = time.monotonic() - began
        engines = sum(status.label.startswith('engine') for status in runtime.statuses())
    finally:
        runtime.close('the trial is over')
    number = f'{engines} simulated engines' if engines > 1 else '1 simulated engine'
    return Check.ok(name, f'{number} behind the router answered after {took_s:.1f} s')
