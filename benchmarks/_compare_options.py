"""What a comparison is told: its arguments, and what holds where nothing is said."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from benchmarks import _prompt_file, prefix_reuse_dataset
from benchmarks._arms import ARMS, BLOCK_TOKENS, USUAL_ARMS, Engine, Settings
from benchmarks._document_text import LABELS
from benchmarks.prefix_reuse_dataset import Parameters
from benchmarks.vllm_dynamo_kv_benchmark import above_zero, add_settings, positive, words
from tools.small_model import FULL_DIRECTORY, TOKENIZER_DIRECTORY

USUAL_COHORTS = ('0', '25', '75', '95')
# The documents of the families over the KV cache of one engine: more than one holds, and less
# than two do.
WORKING_SET_IN_CACHES = 1.5


@dataclasses.dataclass(frozen=True)
class Preset:
    """What is measured with an engine where nothing else is asked for.

    Attributes:
      num_records: Prompts of each cohort.
      num_families: Documents that they share.
      prefix_tokens: Tokens of a document.
      max_num_seqs: How many prompts an engine works on at once; ``None`` for its default.
      model: Which model; ``None`` where there is no telling.
    """

    num_records: int
    num_families: int
    prefix_tokens: int
    max_num_seqs: int | None
    model: Path | None


PRESETS: Mapping[Engine, Preset] = {
    'simulated': Preset(1024, 64, 2048, 32, TOKENIZER_DIRECTORY),
    'cpu': Preset(72, 12, 1024, 8, FULL_DIRECTORY),
    'vllm': Preset(4096, 256, 2048, None, None),
}


def make_parser() -> argparse.ArgumentParser:
    """The arguments of a comparison."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.compare',
        description='Run all arms over all cohorts and report which to choose.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--model', help='a hub name or a directory; default on simulated and CPU engines: '
        'SmolLM2-135M-Instruct')  # fmt: skip
    add('--out', type=Path, required=True, help='a directory for the reports; '
        'those of an earlier comparison there are replaced')  # fmt: skip
    add('--num_engines', type=positive, default=2, help='default: %(default)s')
    add('--arms', type=_arms, default=USUAL_ARMS,
        help=f'of {", ".join(ARMS)}, with commas; default: {",".join(USUAL_ARMS)}')  # fmt: skip
    add('--cohorts', type=_names, help='with commas; default: 0,25,75,95 per cent of reuse, or '
        'all that --input has')  # fmt: skip
    add('--repeats', type=positive, default=3, help='of each run; default: %(default)s')
    add('--input', help='your own prompts: a file or pattern of JSON lines, each with a "prompt" '
        'and, if it has one, a "cohort"')  # fmt: skip
    add('--labels', type=words, help='words, with commas, that an answer may be; '
        'default: those of the prompts that are made, and none for your own')  # fmt: skip
    add('--num_records', type=positive, help='prompts made for each cohort')
    add('--num_families', type=positive, help='documents that they share')
    add('--prefix_tokens', type=positive, help='tokens of a document')
    add('--price_per_hour', type=above_zero, help='of all engines together, for the cost')
    add('--run_timeout_secs', type=above_zero, default=3600.0,
        help='of one run, its start included; default: %(default)s')  # fmt: skip
    add_settings(parser)
    return parser


def make_settings(options: argparse.Namespace) -> Settings:
    """The settings of the runs; fills in whatever was not given.

    Raises:
      ValueError: Something is missing, or does not go together.
    """
    preset = PRESETS[options.engine]
    for name in ('num_records', 'num_families', 'prefix_tokens'):
        if getattr(options, name) is None:
            setattr(options, name, getattr(preset, name))
        elif options.input is not None:
            raise ValueError(f'--{name} is about prompts that are made; leave it out with --input.')
    options.num_gpus = options.num_engines
    if options.model is None:
        if preset.model is None:
            raise ValueError(f'--engine {options.engine} needs a --model.')
        if not preset.model.is_dir():
            kind = 'env-cpu' if options.engine == 'cpu' else 'env'
            raise ValueError(f'there is no {preset.model}; `make {kind}` makes it.')
        options.model = str(preset.model)
    if options.max_num_seqs is None:
        options.max_num_seqs = preset.max_num_seqs
    if options.kv_cache_tokens is None and options.engine != 'vllm' and options.input is None:
        options.kv_cache_tokens = _kv_cache_tokens(options)
    if options.labels is None:
        options.labels = LABELS if options.input is None else ()
    return Settings(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Settings)})


def _kv_cache_tokens(options: argparse.Namespace) -> int:
    """How large a cache is that holds some of the documents and not all."""
    if options.num_families < WORKING_SET_IN_CACHES:
        raise ValueError(
            f'--num_families is {options.num_families}, and a cache that is smaller than its '
            'document could hold no prompt; give 2 or more, or --kv_cache_tokens.'
        )
    block = BLOCK_TOKENS[options.engine]
    tokens: float = options.num_families * options.prefix_tokens / WORKING_SET_IN_CACHES
    return round(tokens / block) * block


def find_cohorts(options: argparse.Namespace, settings: Settings) -> list[Parameters] | list[str]:
    """What each cohort is made from, or with ``--input`` its name.

    Raises:
      ValueError: A cohort is unknown or empty, or the input cannot be used.
    """
    if options.input is not None:
        found = _prompt_file.examine(options.input).cohorts
        for name in options.cohorts or ():
            if name not in found:
                raise ValueError(
                    f'cohort {name} has no prompts in {options.input}; there are '
                    f'{", ".join(sorted(found))}.'
                )
        return list(options.cohorts or found)
    parameters: list[Parameters] = []
    for name in options.cohorts or USUAL_COHORTS:
        try:
            fraction = float(name) / 100
        except ValueError:
            raise ValueError(
                f'cohort {name!r} is no number; without --input a cohort is the reuse in per cent.'
            ) from None
        made = Parameters(
            options.num_records,
            fraction,
            options.num_families,
            options.prefix_tokens,
            options.seed,
            settings.model,
            settings.model_revision,
        )
        if made.cohort in (earlier.cohort for earlier in parameters):
            raise ValueError(f'--cohorts names {made.cohort} twice, the second time as {name}.')
        prefix_reuse_dataset.check_length(made)
        parameters.append(made)
    return parameters


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(','))
    if not all(names):
        raise argparse.ArgumentTypeError(f'{text!r} holds an empty name')
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f'{text!r} holds a name twice')
    return names


def _arms(text: str) -> tuple[str, ...]:
    names = _names(text)
    for name in names:
        if name not in ARMS:
            raise argparse.ArgumentTypeError(
                f'there is no arm {name!r}; there are {", ".join(ARMS)}'
            )
    return names
