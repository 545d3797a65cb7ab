"""What tests on real vLLM engines on CPU cores have in common."""

from __future__ import annotations

import importlib.util

import pytest

from tools.small_model import FULL_DIRECTORY

MODEL = str(FULL_DIRECTORY)

ON_REAL_ENGINES = [
    pytest.mark.cpu,
    pytest.mark.timeout(900),  # an idle machine needs a fifth of it
    pytest.mark.usefixtures('nothing_left'),
    pytest.mark.skipif(
        importlib.util.find_spec('vllm') is None or not FULL_DIRECTORY.is_dir(),
        reason='needs the CPU build of vLLM and the model: run `make test-cpu`',
    ),
]
