"""Owns a stack whose engines are fakes, and waits to be killed."""

from __future__ import annotations

import os
import signal

from apache_beam_vllm_dynamo import VLLMCompletionsModelHandler

LIFETIME_S = 120


def main() -> None:
    """Starts the stack, says so and waits."""
    signal.alarm(LIFETIME_S)
    handler = VLLMCompletionsModelHandler('m', env_vars={'PYTHONPATH': os.environ['PYTHONPATH']})
    print('starting', flush=True)
    model = handler.load_model()
    print(model.status()[0].pid, flush=True)
    while True:
        signal.pause()
