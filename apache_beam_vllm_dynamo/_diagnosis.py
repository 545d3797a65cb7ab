"""What the last lines of a child's log mean, for the causes that users meet.

A start that failed for one of these causes fails again the same way, so that
:attr:`Diagnosis.retry` decides what the log of a dead child is worth: start again with
other addresses, start again as after a crash, or stop trying.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Why a child ended.

    Attributes:
      cause: A short name of it.
      hint: What to do about it, a sentence or two.
      retry: Whether another start can help: never, with other addresses, or at all.
      lives_on: Whether a process with this cause lives, and never serves.
    """

    cause: str
    hint: str
    retry: Literal['never', 'other_addresses', 'yes'] = 'never'
    lives_on: bool = False


# How Dynamo, vLLM, uvicorn, etcd and the modules logging and warnings begin a line that tells
# of no failure. Such lines name causes that were overcome: an optional module that is not
# there, a hub that did not answer although the model was at hand. The frontend is the exception: it
# tries for ever, with a warning each time, what cannot come to work.
_NO_TEMPLATE = r'chat_template field is required|MDC does not contain a prompt formatter'
_NO_TOKENIZER = r'chat pipeline requires preprocessed routing'
_FAILURE_ALL_THE_SAME = re.compile(f'{_NO_TEMPLATE}|{_NO_TOKENIZER}')
_NO_FAILURE = re.compile(
    r'(?:\x1b\[[\d;]*m|\([^)]*\)|\d{4}-\d\d-\d\dT\S+|\s)*(?:TRACE|DEBUG|INFO|WARN|WARNING)\b'
    r'|\{.*"level":\s*"(?:trace|debug|info|warn|warning)"'
    r'|\S+:\d+: \w*Warning: ',
    re.IGNORECASE,
)

UNKNOWN = Diagnosis('unknown', '', 'yes')

# The first that matches wins: an engine out of memory also writes of many other things.
KNOWN: tuple[tuple[re.Pattern[str], Diagnosis], ...] = tuple(
    (re.compile('|'.join(patterns), re.IGNORECASE), diagnosis)
    for patterns, diagnosis in (
        (
            (r'address already in use|port \d+ already in use|errno 98\b|EADDRINUSE',),
            Diagnosis('address in use', 'Another process took its port.', 'other_addresses'),
        ),
        (
            (
                r'CUDA out of memory|OutOfMemoryError|CUDA error: out of memory',
                r'No available memory for the cache blocks|Free memory on device .* is less than',
                r'larger than the maximum number of tokens that can be stored in KV cache',
                r'larger than the available KV cache|estimated maximum model length',
            ),
            Diagnosis(
                'out of GPU memory',
                'The GPU has too little memory for it. Lower max-num-seqs and max-model-len; set '
                'gpu-memory-utilization lower if other processes use this GPU, higher if the KV '
                'cache did not fit; or give the engine more GPUs.',
            ),
        ),
        (
            (r'is less than desired CPU memory utilization|DefaultCPUAllocator: .*memory',),
            Diagnosis(
                'out of memory',
                'The worker has too little memory for it. Set gpu-memory-utilization lower (on CPU '
                'engines it means main memory), or VLLM_CPU_KVCACHE_SPACE (GiB) in env; or use '
                'fewer engines or a larger machine.',
            ),
        ),
        (
            (_NO_TEMPLATE,),
            Diagnosis(
                'no chat template',
                'Dynamo serves no model without a chat template. Put a chat_template.jinja beside '
                'tokenizer_config.json in the directory of the model, or give chat_template_path '
                'to the chat handler.',
                lives_on=True,
            ),
        ),
        (
            (_NO_TOKENIZER,),
            Diagnosis(
                'no tokenizer',
                'Dynamo found no tokenizer that it reads in the model: a tokenizer.json, '
                'tiktoken.model or *.tiktoken. `transformers` writes the first of most models: '
                'AutoTokenizer.from_pretrained(model).save_pretrained(directory).',
                lives_on=True,
            ),
        ),
        (
            (r'Rejected incompatible workers',),
            Diagnosis(
                'engines differ',
                'The frontend serves engines that are alike only. Give all engines the same flags, '
                'but for their devices.',
                lives_on=True,
            ),
        ),
        (
            (
                r'unrecognized arguments?|unknown arguments? specified|error: argument ',
                r'invalid choice: |^ValueError: --[a-z-]+',
                r'expected (one|at least one) argument',
            ),
            Diagnosis(
                'unknown flag',
                'It does not take one of the flags it was given, or not with that value; compare '
                'vllm_server_kwargs, simulation_kwargs and frontend_kwargs with its --help.',
            ),
        ),
        (
            (r'no space left on device',),
            Diagnosis('disk full', 'The disk of the worker is full; give it a larger one.'),
        ),
        (
            # A part of vLLM that was not built for this machine begins with an underscore.
            (r'No module named [\'"]?(dynamo|vllm|zmq)\b(?!\._)',),
            Diagnosis(
                'package not installed',
                'Install it where the workers run: `pip install "ai-dynamo[vllm]==1.6.1"` for '
                'engines behind Dynamo, `pip install vllm` for the native server.',
            ),
        ),
        (
            (
                r'RepositoryNotFoundError|is not a local folder and is not a valid model',
                r'Repository Not Found|Invalid repository ID or local directory',
                r'Repo id must be in the form|LocalEntryNotFoundError|offline mode is enabled',
                r'does not appear to have a file named|model path .* does not exist',
                r'Failed to (fetch|download) model|GatedRepoError',
                r'unable to extract config\.json from directory',
            ),
            Diagnosis(
                'model not found',
                'The model could not be read. Check model_name (a local directory must exist on '
                'the worker, a hub name must be spelled exactly) and, for gated models, that '
                "HF_TOKEN is in the worker's environment.",
            ),
        ),
        (
            (
                r'No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal',
                r'Failed to infer device type|Found no NVIDIA driver|libcuda\.so\.1',
                r'NVML.* not found|CUDA driver version is insufficient',
                r'larger than the number of available GPUs|exceeds available GPUs',
            ),
            Diagnosis(
                'too few GPUs',
                'It found no usable GPU. Check that the worker has as many GPUs as the config '
                'names and a driver new enough; to develop without GPUs, use '
                "engine_kind='cpu' or 'simulated'.",
            ),
        ),
        (
            (
                r'Unable to create lease|Could not connect to etcd',
                r'etcd.{0,200}(connection refused|unavailable|timed? ?out)',
                r'ConnectError.{0,200}etcd',
            ),
            Diagnosis(
                'etcd not reachable',
                'It could not reach etcd. Check ETCD_ENDPOINTS on the worker, or unset it to have '
                'one started.',
                'yes',
            ),
        ),
        (
            (r'validation errors? for \w*(Config|Args)\b',),
            Diagnosis(
                'setting refused',
                'vLLM does not take a setting, alone or for this model; the end of the log says '
                'which. Change it in vllm_server_kwargs.',
            ),
        ),
    )
)


def diagnose(log_tail: Sequence[str]) -> Diagnosis:
    """The first known cause that the log names, or :data:`UNKNOWN`."""
    text = '\n'.join(
        line
        for line in log_tail
        if not _NO_FAILURE.match(line) or _FAILURE_ALL_THE_SAME.search(line)
    )
    for pattern, diagnosis in KNOWN:
        if pattern.search(text):
            return diagnosis
    return UNKNOWN
