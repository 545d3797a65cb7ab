"""Two arms of the benchmark, once, on real vLLM engines on CPU cores."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from apache_beam_vllm_dynamo import _clients, _model_server
from benchmarks import prefix_reuse_dataset, vllm_dynamo_kv_benchmark
from benchmarks._arms import BLOCK_TOKENS
from benchmarks._comparison import measure_reuse, read_output
from benchmarks._run_figures import figures_of
from benchmarks._token_counts import token_counter
from benchmarks.prefix_reuse_dataset import Parameters
from tests.support.real_engines import MODEL, ON_REAL_ENGINES

pytestmark = ON_REAL_ENGINES

# Round-robin differs from dynamo-kv by one flag of the frontend, which simulated engines show.
ARMS = ('native-dp', 'dynamo-kv')
RECORDS = 12
PREFIX_TOKENS = 384  # three KV blocks of a CPU engine


def run(arm: str, prompts: pathlib.Path, directory: pathlib.Path) -> tuple[Any, Any]:
    """The manifest and the lines of one run on two engines."""
    output = directory / arm
    arguments = {
        'arm': arm, 'engine': 'cpu', 'num_gpus': 2, 'model': MODEL, 'input': prompts,
        'output': output, 'run_id': 1, 'max_tokens': 4, 'max_num_seqs': 4, 'max_model_len': 1024,
        'kv_cache_tokens': 8192, 'runner': 'FnApiRunner',
    }  # fmt: skip
    try:
        vllm_dynamo_kv_benchmark.main([f'--{name}={value}' for name, value in arguments.items()])
    finally:
        # Beam keeps a server until its process ends, and the next arm wants the same cores.
        _clients.close_all()
        _model_server.close_all()
    return read_output(output)


def test_native_and_kv_routing_answer_the_same_prompts(tmp_path: pathlib.Path) -> None:
    """Both answer all of them, reuse prefixes within the ceiling, and give like answers."""
    prompts = tmp_path / 'prompts.jsonl'
    made = Parameters(RECORDS, 0.75, 2, PREFIX_TOKENS, model=MODEL)
    prefix_reuse_dataset.write(made, prompts)
    ceiling = measure_reuse(prompts, token_counter(MODEL), BLOCK_TOKENS['cpu']).ceiling
    found, texts = {}, {}
    for arm in ARMS:
        manifest, rows = run(arm, prompts, tmp_path)
        engines = None if arm == 'native-dp' else 2
        found[arm] = figures_of(manifest, rows, cohort='75', repeat=1, engines=engines)
        texts[arm] = {row['id']: row['text'] for row in rows}
        assert manifest['stand_in'] is None
    for arm, figures in found.items():
        assert (figures.failed, figures.restarts) == (0, 0), arm
        assert figures.records_per_s, arm
        assert 0 < figures.cached_share <= ceiling, arm
    assert found['dynamo-kv'].ttft_ms is not None
    assert found['native-dp'].engine_shares is found['native-dp'].ttft_ms is None
    # Greedy, but batched in other ways, which in float32 tips hardly any choice of a token.
    same = [texts['dynamo-kv'][name] == text for name, text in texts['native-dp'].items()]
    assert sum(same) >= RECORDS - 1, json.dumps(texts)
