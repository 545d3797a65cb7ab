"""Owns a whole stack, and waits to be killed."""

from __future__ import annotations

import os
import signal
from typing import Literal

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    VLLMCompletionsModelHandler,
)
from tools.small_model import FULL_DIRECTORY, TOKENIZER_DIRECTORY

Engines = Literal['simulated', 'cpu']

ENGINES = 2
LIFETIME_S = 400  # what is never killed ends by itself
STARTING = 'starting'
SERVES = 'serves'


def handler(engines: Engines) -> VLLMCompletionsModelHandler:
    """Two engines, simulated or real ones on CPU cores."""
    if engines == 'simulated':
        return VLLMCompletionsModelHandler(
            os.fspath(TOKENIZER_DIRECTORY),
            use_dynamo=True,
            dynamo_runtime_config=DynamoRuntimeConfig.for_devices(
                num_engines=ENGINES, engine_kind='simulated'
            ),
        )
    spec = DynamoVLLMEngineSpec(
        # float32: the CPU build gives wrong text in bfloat16 without compilation.
        vllm_server_kwargs={
            'dtype': 'float32', 'enforce-eager': True, 'max-model-len': 1024, 'max-num-seqs': 8,
        },
        env={'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1'},
    )  # fmt: skip
    return VLLMCompletionsModelHandler(
        os.fspath(FULL_DIRECTORY),
        use_dynamo=True,
        dynamo_runtime_config=DynamoRuntimeConfig(
            (spec,) * ENGINES, engine_kind='cpu', start_timeout_secs=300
        ),
    )


def main(engines: Engines) -> None:
    """Starts the stack, says so, and asks it until killed."""
    signal.alarm(LIFETIME_S)
    owner = handler(engines)
    print(STARTING, flush=True)
    model = owner.load_model()
    assert all(status.state == 'serving' for status in model.status())
    print(SERVES, flush=True)
    while True:
        owner.run_inference(['Once upon a time'] * 32, model, {'max_tokens': 100})
