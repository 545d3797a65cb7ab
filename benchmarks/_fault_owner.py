"""Owns a whole stack on simulated engines, and waits to be killed."""

from __future__ import annotations

import os
import signal

from apache_beam_vllm_dynamo import DynamoRuntimeConfig, VLLMCompletionsModelHandler
from tools.small_model import TOKENIZER_DIRECTORY

LIFETIME_S = 120
STARTING = 'starting'
SERVES = 'serves'


def main() -> None:
    """Starts the stack, says so and waits."""
    signal.alarm(LIFETIME_S)
    handler = VLLMCompletionsModelHandler(
        os.fspath(TOKENIZER_DIRECTORY),
        use_dynamo=True,
        dynamo_runtime_config=DynamoRuntimeConfig.for_devices(
            num_engines=2, engine_kind='simulated'
        ),
    )
    print(STARTING, flush=True)
    model = handler.load_model()
    assert all(status.state == 'serving' for status in model.status())
    print(SERVES, flush=True)
    while True:
        signal.pause()
