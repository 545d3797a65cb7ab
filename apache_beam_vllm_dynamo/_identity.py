"""What tells one server from another: equal settings give equal identities in every process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# What the servers read of the environment; the rest of it may differ from process to process.
_SERVER_VARIABLES = (
    'CUDA_', 'DYN_', 'ETCD_', 'HF_', 'LD_LIBRARY_PATH', 'NCCL_', 'NVIDIA_', 'PYTHON', 'TORCH_',
    'TRANSFORMERS_', 'TRITON_', 'VLLM_',
)  # fmt: skip
# What torch, vLLM or transformers write into the environment of the process that imports or uses
# them, and again into that of a server: two processes of which one has are alike.
_SET_BY_LIBRARIES = frozenset({
    'CUDA_MODULE_LOADING', 'NCCL_CUMEM_ENABLE', 'NCCL_GRAPH_MIXING_SUPPORT', 'TORCH_WARM_POOL',
    'TRITON_CACHE_AUTOTUNING', 'TRITON_CACHE_DIR', 'TRITON_LIBDEVICE_PATH', 'TRITON_PTXAS_PATH',
    'VLLM_WORKER_MULTIPROC_METHOD',
})  # fmt: skip
# The last speaks with itself in other processes.
_PACKAGES = ('vllm', 'torch', 'transformers', 'ai-dynamo', 'apache-beam-vllm-dynamo')
DIGITS = 16  # of 64: no two of the few servers of a machine have these in common


def identity_of(*settings: object) -> str:
    """A name for these settings that is fit for a file and says nothing of their values."""
    text = json.dumps(_plain(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


@functools.cache
def installation() -> tuple[object, ...]:
    """What servers would be made of: the interpreter, and the packages that matter by version.

    Not by their place: Beam's containers make an environment for each SDK process of a worker pool,
    all alike and each in a directory of its own.
    """
    return sys.base_prefix, sys.version, *((name, _version(name)) for name in _PACKAGES)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def settings_of(env: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """What counts of a server's environment: what is read by it, and what was set for it.

    Args:
      env: All of it.
      named: The variables that were set for it. What the process itself has of them does not
        matter: a library may have set it since, in this process alone.
    """
    return {
        name: value
        for name, value in env.items()
        if name in named or (name.startswith(_SERVER_VARIABLES) and name not in _SET_BY_LIBRARIES)
    }


def model_of(name: str) -> str:
    """The model, the same whatever directory a path to it begins at."""
    return os.path.realpath(name) if os.path.exists(name) else name  # noqa: PTH110 - it is text


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
