"""What the end of a child's log is taken to mean.

The logs follow those of the programs as they were seen, shortened: vLLM 0.31, Dynamo 1.6,
etcd 3.5, torch, argparse and huggingface_hub.
"""

from __future__ import annotations

import time

import pytest

from apache_beam_vllm_dynamo._diagnosis import UNKNOWN, diagnose

TRACEBACK = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/venv/lib/python3.11/site-packages/dynamo/vllm/__main__.py", line 7, in <module>
    main()
"""

VLLM_START = """\
2026-11-30T05:55:06.035684Z  INFO args.parse_args: Using kv_events_config for publishing vLLM kv \
events over zmq: KVEventsConfig(enable_kv_cache_events=True, endpoint='ipc:///tmp/x/kv0inproc')
INFO 11-30 05:55:08 [utils.py:253] non-default args: {'model': 'org/model', 'max_model_len': 4096, \
'max_num_seqs': 8, 'gpu_memory_utilization': 0.9}
INFO 11-30 05:55:09 [model.py:514] Resolved architecture: LlamaForCausalLM
WARNING 11-30 05:55:09 [interface.py:465] Failed to import from vllm._C with \
ModuleNotFoundError("No module named 'vllm._C'")
(EngineCore pid=811) INFO 11-30 05:55:11 [core.py:97] Initializing a V1 LLM engine (v0.31.0)
(EngineCore pid=811) INFO 11-30 05:55:20 [gpu_model_runner.py:4012] Model loading took 0.3 GiB
"""

DYNAMO_HUB = """\
2026-11-30T05:55:45.441779Z  INFO main.prefetch_model: Pre-fetching model from HuggingFace: org/m
2026-11-30T05:55:45.443631Z  WARN dynamo_llm::hub: Cannot connect to ModelExpress server: \
Transport error: tcp connect error: Connection refused (os error 111). Using direct download.
2026-11-30T05:55:45.454985Z  WARN main.prefetch_model: Failed to pre-fetch model: Failed to fetch \
model 'org/m' at revision 'main' from HuggingFace. Is this a valid HuggingFace ID and revision?
[transformers] PyTorch was not found. Models won't be available and only tokenizers can be used.
2026-11-30T05:55:46.217178Z  INFO dynamo_runtime::distributed: Initializing KV store discovery \
backend: Etcd(http://127.0.0.1:9)
"""

ETCD_WAITS = """\
2026-11-30T06:00:44.539146Z  WARN dynamo_runtime::transports::etcd: etcd not reachable yet; \
retrying startup connection error=Unable to create lease. Check etcd server status at http://127.0.0.1:9
"""

CAUSES: dict[str, tuple[str, str]] = {
    'frontend, port taken': (
        'address in use',
        """\
2026-11-30T05:55:46.560969Z ERROR dynamo_llm::http::service::service_v2: Failed to bind server to \
address protocol=HTTP address=127.0.0.1:21998 error=Address already in use (os error 98)
2026-11-30T05:55:46.561368Z  INFO dynamo_runtime::runtime: Runtime shutdown initiated
"""
        + TRACEBACK
        + 'Exception: Failed to start HTTP server: port 21998 already in use. Use --http-port to '
        'specify a different port.',
    ),
    'engine, system port taken': (
        'address in use',
        ('2026-11-30T05:55:47.471Z ERROR dynamo_runtime::distributed: System status server startup '
        'failed error=Failed to bind to address: Address already in use (os error 98)'),
    ),
    'etcd, port taken': (
        'address in use',
        ('{"level":"warn","ts":"2026-11-30T05:55:49.520Z","msg":"failed to start etcd"}\n'
        '{"level":"fatal","ts":"2026-11-30T05:55:49.520Z","caller":"etcdmain/etcd.go:203","msg":'
        '"discovery failed","error":"listen tcp 127.0.0.1:21998: bind: address already in use"}'),
    ),
    'native server, port taken': (
        'address in use',
        VLLM_START + TRACEBACK + 'OSError: [Errno 98] Address already in use',
    ),
    'event broker, socket taken': (
        'address in use',
        TRACEBACK + "zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/x/events-in')",
    ),
    'torch, out of memory while the model is loaded': (
        'out of GPU memory',
        VLLM_START
        + '(EngineCore pid=811) ERROR 11-30 05:55:21 [core.py:900] torch.OutOfMemoryError: CUDA '
        'out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity of 14.56 GiB of '
        'which 77.81 MiB is free.\n' + TRACEBACK + 'RuntimeError: Engine core initialization '
        'failed. See root cause above. Failed core proc(s): {}',
    ),
    'torch, out of memory in a kernel': (
        'out of GPU memory',
        TRACEBACK + 'RuntimeError: CUDA error: out of memory',
    ),
    'vLLM, sampler warm-up': (
        'out of GPU memory',
        TRACEBACK + 'RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 '
        'dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization`.',
    ),
    'vLLM, memory held by another process': (
        'out of GPU memory',
        TRACEBACK + 'ValueError: Free memory on device cuda:0 (2.1/14.56 GiB) on startup is less '
        'than desired GPU memory utilization (0.9, 13.1 GiB). Decrease GPU memory utilization.',
    ),
    'vLLM, no room for the cache': (
        'out of GPU memory',
        TRACEBACK + 'ValueError: No available memory for the cache blocks. Try increasing '
        '`gpu_memory_utilization` when initializing the engine.',
    ),
    'vLLM, cache too small for one request': (
        'out of GPU memory',
        TRACEBACK + "ValueError: To serve at least one request with the model's max seq len "
        '(131072), (16.0 GiB KV cache is needed, which is larger than the available KV cache '
        'memory (4.2 GiB). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.',
    ),
    'vLLM on CPU, too little memory': (
        'out of memory',
        TRACEBACK + 'ValueError: Available memory on node 0 (3.1/7.6 GiB) on startup is less than '
        'desired CPU memory utilization (0.9, 6.9 GiB).',
    ),
    'argparse, unknown flag': (
        'unknown flag',
        ('usage: __main__.py [-h] [--model-path MODEL_PATH]\n'
        '__main__.py: error: unrecognized arguments: --bogus 3'),
    ),
    'argparse, wrong value': (
        'unknown flag',
        "api_server.py: error: argument --max-num-seqs: invalid int value: '1k'",
    ),
    'argparse, not a choice': (
        'unknown flag',
        "__main__.py: error: argument --router-mode: invalid choice: 'fast' (choose from 'kv')",
    ),
    'argparse, no value': (
        'unknown flag',
        '__main__.py: error: argument --router-mode: expected one argument',
    ),
    'frontend, a model without a chat template': (
        'no chat template',
        ('2026-11-30T05:55:46Z  WARN dynamo_llm::discovery::controller: Model materialization '
        'failed; scheduling retry error="chat_template field is required in the '
        'tokenizer_config.json file"'),
    ),
    'frontend, a model without the file that would have it': (
        'no chat template',
        ('2026-11-30T05:55:46Z  WARN dynamo_llm::discovery::controller: Model materialization '
        'failed; scheduling retry error="prompt_formatter_from_mdc: MDC does not '
        'contain a prompt formatter"'),
    ),
    'frontend, a model without a tokenizer that it reads': (
        'no tokenizer',
        ('2026-11-30T05:55:46Z  WARN dynamo_llm::discovery::controller: Model materialization '
        'failed; scheduling retry error="chat pipeline requires preprocessed routing"'),
    ),
    'frontend, engines with blocks of different sizes': (
        'engines differ',
        ('2026-12-01T03:43:43Z ERROR dynamo_llm::discovery::controller: Rejected incompatible '
        'workers; the first accepted configuration retains the WorkerSet model=m'),
    ),
    'Dynamo is not installed': (
        'package not installed',
        ("/venv/bin/python: Error while finding module specification for 'dynamo.vllm' "
        "(ModuleNotFoundError: No module named 'dynamo')"),
    ),
    'vLLM is not installed': (
        'package not installed',
        TRACEBACK + "ModuleNotFoundError: No module named 'vllm'",
    ),
    'python -m, a module that is not there': (
        'package not installed',
        '/venv/bin/python: No module named dynamo.frontend',
    ),
    'pyzmq is not installed': (
        'package not installed',
        TRACEBACK + "ModuleNotFoundError: No module named 'zmq'",
    ),
    'Dynamo, model not on the hub': (
        'model not found',
        DYNAMO_HUB + TRACEBACK + "Exception: Failed to fetch model 'org/m' at revision 'main' from "
        'HuggingFace. Is this a valid HuggingFace ID and revision?',
    ),
    'vLLM, model not on the hub': (
        'model not found',
        TRACEBACK + 'pydantic_core._pydantic_core.ValidationError: 1 validation error for '
        "ModelConfig\n  Value error, Invalid repository ID or local directory specified: '/no'.",
    ),
    'transformers, model not on the hub': (
        'model not found',
        TRACEBACK + "OSError: org/nope is not a local folder and is not a valid model identifier "
        "listed on 'https://huggingface.co/models'",
    ),
    'hub, gated': (
        'model not found',
        TRACEBACK + 'huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model '
        'meta-llama/Llama-3.1-8B is restricted.',
    ),
    'hub, offline': (
        'model not found',
        TRACEBACK + 'huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested '
        'files in the disk cache and outgoing traffic has been disabled.',
    ),
    'no GPU': (
        'too few GPUs',
        TRACEBACK + 'RuntimeError: Failed to infer device type, please set the environment '
        'variable `VLLM_LOGGING_LEVEL=DEBUG` to turn on verbose logging',
    ),
    'a GPU that is not there': (
        'too few GPUs',
        TRACEBACK + 'torch.AcceleratorError: CUDA error: invalid device ordinal',
    ),
    'fewer GPUs than ranks': (
        'too few GPUs',
        TRACEBACK + 'pydantic_core._pydantic_core.ValidationError: 1 validation error for '
        'ParallelConfig\n  Value error, World size (4) is larger than the number of available GPUs '
        '(2) in this node.',
    ),
    'no driver': (
        'too few GPUs',
        TRACEBACK + 'ImportError: libcuda.so.1: cannot open shared object file: No such file',
    ),
    'disk full while the model comes': (
        'disk full',
        TRACEBACK + "RuntimeError: Failed to download model 'org/m': No space left on device "
        '(os error 28)',
    ),
    'etcd did not answer for two minutes': (
        'etcd not reachable',
        DYNAMO_HUB + ETCD_WAITS
        + '2026-11-30T06:01:13.524137Z ERROR dynamo_runtime::distributed: Could not connect to '
        'etcd. Pass `--discovery-backend ..` to use a different backend or start etcd. err=etcd '
        'startup connection timed out after 120 seconds\n' + TRACEBACK
        + 'Exception: etcd startup connection timed out after 120 seconds',
    ),
    'etcd not there, as older releases say it': (
        'etcd not reachable',
        ("thread '<unnamed>' panicked at lib/bindings/python/rust/lib.rs:401:13:\n"
        'called `Result::unwrap()` on an `Err` value: Unable to create lease. Check etcd server '
        'status at http://localhost:2379\n'
        'note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace'),
    ),
    'vLLM, settings that exclude each other': (
        'setting refused',
        TRACEBACK + 'pydantic_core._pydantic_core.ValidationError: 1 validation error for '
        'ModelConfig\n  Value error, User-specified max_model_len (8192) is greater than the '
        'derived max_model_len (max_position_embeddings=2048).',
    ),
}  # fmt: skip


@pytest.mark.parametrize(('cause', 'log'), CAUSES.values(), ids=CAUSES.keys())
def test_a_known_cause_is_named(cause: str, log: str) -> None:
    assert diagnose(log.splitlines()).cause == cause


ORDINARY: dict[str, str] = {
    'nothing': '',
    'a start': VLLM_START,
    'a start without a hub': DYNAMO_HUB,
    'waiting for etcd, which came then': ETCD_WAITS,
    'flags that are printed': (
        "Command: ['python', '-m', 'dynamo.vllm', '--max-model-len', '4096', "
        "'--gpu-memory-utilization', '0.9', '--max-num-seqs', '8', '--kv-events-config', '{}']"
    ),
    'the summary of the flags': (
        'usage: __main__.py [-h] [--max-model-len MAX_MODEL_LEN] [--etcd-endpoints ENDPOINTS]'
    ),
    'a crash of another kind': TRACEBACK + 'ValueError: something else',
    'a crash after a start': VLLM_START + TRACEBACK + 'RuntimeError: something else',
    'an engine core that failed for a cause beyond the tail': (
        TRACEBACK + 'RuntimeError: Engine core initialization failed. See root cause above.'
    ),
    'memory that was saved': (
        '(EngineCore pid=811) INFO 11-30 05:55:21 [gpu_worker.py:298] Available KV cache memory: '
        '10.1 GiB\n(EngineCore pid=811) INFO 11-30 05:55:21 [kv_cache_utils.py:1087] GPU KV cache '
        'size: 88,320 tokens, Maximum concurrency for 4,096 tokens per request: 21.56x'
    ),
    'colours': (
        '\x1b[0;36m(EngineCore pid=811)\x1b[0;0m WARNING 11-30 05:55:21 [x.py:1] CUDA out of '
        'memory is avoided by a smaller batch\n\x1b[33mWARN\x1b[0m hub: Repository Not Found, next '
        'try'
    ),
    'lines of JSON': (
        '{"time":"2026-11-30T05:55:06Z","level":"WARN","target":"dynamo_llm::hub","message":"'
        'Failed to fetch model"}\n{"level":"warn","ts":"x","msg":"etcd: lease timed out, retrying"}'
    ),
    "Python's own warnings": (
        '/venv/lib/python3.11/site-packages/torch/cuda/__init__.py:182: UserWarning: CUDA '
        'initialization: Found no NVIDIA driver on your system.\n'
        "WARNING:root:No module named 'vllm' - optional\n"
        "INFO:     Started server process [12]"
    ),
    'a module of vLLM that is not built for this machine': (
        TRACEBACK + "ModuleNotFoundError: No module named 'vllm._C'"
    ),
    'names that only begin alike': (
        TRACEBACK + "ModuleNotFoundError: No module named 'dynamodb'"
    ),
    'a port': '2026-11-30T05:55:46Z  INFO service: address="127.0.0.1:9898" errno=0',
    'a request that was too long': (
        '2026-11-30T05:55:46Z ERROR http: prompt of 2349 tokens exceeds max-model-len 2048'
    ),
}  # fmt: skip


@pytest.mark.parametrize('log', ORDINARY.values(), ids=ORDINARY.keys())
def test_a_log_without_a_known_cause_is_given_none(log: str) -> None:
    found = diagnose(log.splitlines())
    assert found is UNKNOWN
    assert (found.retry, found.hint) == ('yes', '')


@pytest.mark.parametrize('cause', sorted({cause for cause, _ in CAUSES.values()}))
def test_only_what_can_change_is_tried_again(cause: str) -> None:
    log = next(log for name, log in CAUSES.values() if name == cause)
    changing = {'address in use': 'other_addresses', 'etcd not reachable': 'yes'}
    assert diagnose(log.splitlines()).retry == changing.get(cause, 'never')


@pytest.mark.parametrize(
    ('cause', 'names'),
    [
        ('out of GPU memory', ['max-num-seqs', 'gpu-memory-utilization', 'max-model-len']),
        ('out of memory', ['gpu-memory-utilization', 'VLLM_CPU_KVCACHE_SPACE']),
        ('unknown flag', ['vllm_server_kwargs', 'simulation_kwargs', 'frontend_kwargs', '--help']),
        ('package not installed', ['pip install', 'ai-dynamo[vllm]']),
        ('model not found', ['model_name', 'HF_TOKEN']),
        ('too few GPUs', ["engine_kind='cpu'", 'driver']),
        ('disk full', ['larger']),
        ('no chat template', ['chat_template.jinja', 'chat_template_path']),
        ('no tokenizer', ['tokenizer.json', 'save_pretrained']),
        ('engines differ', ['same flags']),
        ('etcd not reachable', ['ETCD_ENDPOINTS']),
        ('setting refused', ['vllm_server_kwargs']),
    ],
)
def test_the_hint_names_what_to_change(cause: str, names: list[str]) -> None:
    log = next(log for name, log in CAUSES.values() if name == cause)
    hint = diagnose(log.splitlines()).hint
    assert hint.endswith('.')
    for name in names:
        assert name in hint


# Of two causes in one log the first of these is what the user has to mend.
PRECEDENCE = [
    ('frontend, port taken', 'etcd did not answer for two minutes'),
    ('torch, out of memory while the model is loaded', 'vLLM, settings that exclude each other'),
    ('torch, out of memory while the model is loaded', 'a GPU that is not there'),
    ('argparse, unknown flag', 'no GPU'),
    ('disk full while the model comes', 'Dynamo, model not on the hub'),
    ('vLLM, model not on the hub', 'vLLM, settings that exclude each other'),
    ('fewer GPUs than ranks', 'vLLM, settings that exclude each other'),
]


@pytest.mark.parametrize(('first', 'second'), PRECEDENCE, ids=[f'{a}, {b}' for a, b in PRECEDENCE])
def test_the_cause_comes_before_its_consequences_in_whatever_order(first: str, second: str) -> None:
    (cause, one), (_, other) = CAUSES[first], CAUSES[second]
    for log in (f'{one}\n{other}', f'{other}\n{one}'):
        assert diagnose(log.splitlines()).cause == cause


def test_a_long_log_is_read_at_once() -> None:
    """No pattern takes the square of a line's length."""
    lines = ['(' * 5_000, ' ' * 5_000 + 'x', 'etcd ' * 2_000, '{' * 5_000] * 10
    start = time.process_time()
    assert diagnose(lines) is UNKNOWN
    assert time.process_time() - start < 1.5
