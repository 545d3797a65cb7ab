"""Prompts that share their beginnings as far as asked: one file of JSON lines and its manifest.

Run as::

    python -m benchmarks.prefix_reuse_dataset --num_records 1024 --reuse_fraction 0.95 \
        --num_families 64 --prefix_tokens 2048 --seed 0 --model DIRECTORY --output prompts.jsonl

Each prompt is an instruction and a document, both long and the same byte for byte within a
family of prompts, and then a short statement to classify, which is different in each. So much
of the records as ``--reuse_fraction`` says are spread evenly over the families; each of the others
has a document of its own, as long as theirs. The families alternate all through the file.

A line holds ``id``, ``family``, ``cohort`` (the reuse in per cent) and ``prompt``. The same
arguments give the same file. The manifest beside it, ``prompts.manifest.json``, holds all of them,
what is in the file, its size and its SHA-256.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import _document_text
from benchmarks._token_counts import TokenCounter, token_counter

Row = dict[str, str]

# More than a token has on average, so that there is something to cut off.
_CHARACTERS_PER_TOKEN = 7
# The documents of so many records are in memory at a time.
_TOGETHER = 64
# How the names of families begin, of several records and of one.
_SHARED, _ALONE = 'family-', 'alone-'


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a data set is made from.

    Attributes:
      num_records: How many prompts.
      reuse_fraction: The share of them, 0 to 1, whose documents are those of the families.
      num_families: How many documents those share.
      prefix_tokens: How long instruction and document are together, in tokens.
      seed: Another one gives other documents, statements and another order.
      model: Whose tokenizer counts; ``None`` for an estimate.
      model_revision: Of the model, where it is a hub's.

    Raises:
      ValueError: A number is out of its range.
    """

    num_records: int
    reuse_fraction: float
    num_families: int
    prefix_tokens: int
    seed: int = 0
    model: str | None = None
    model_revision: str | None = None

    def __post_init__(self) -> None:
        for name in ('num_records', 'num_families', 'prefix_tokens'):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f'--{name} is {value}; it must be 1 or more.')
        if not 0 <= self.reuse_fraction <= 1:  # which nan is not either
            raise ValueError(
                f'--reuse_fraction is {self.reuse_fraction}; it must be a number from 0 to 1, '
                'such as 0.95 for 95 %.'
            )

    @property
    def cohort(self) -> str:
        """The name of the cohort: the reuse in per cent."""
        return f'{self.reuse_fraction * 100:.10g}'

    @property
    def records_of_families(self) -> int:
        """How many records draw from the families."""
        return math.floor(self.num_records * self.reuse_fraction + 0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a data set and its manifest."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.prefix_reuse_dataset',
        description='Write prompts that share their beginnings as far as asked.',
    )
    add = parser.add_argument
    add('--num_records', type=int, default=1024, help='default: %(default)s')
    add('--reuse_fraction', type=float, required=True, help='0 to 1; usual: 0, 0.25, 0.75, 0.95')
    add('--num_families', type=int, default=64, help='default: %(default)s')
    add('--prefix_tokens', type=int, default=2048, help='default: %(default)s')
    add('--seed', type=int, default=0, help='default: %(default)s')
    add('--model', help='count by its tokenizer, if it is at hand; else by an estimate')
    add('--model_revision', help="of the hub's model")
    add('--output', type=Path, required=True, help='the file to write, such as prompts.jsonl')
    options = vars(parser.parse_args(arguments))
    output = options.pop('output')
    try:
        manifest = write(Parameters(**options), output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(manifest, indent=2))
    return 0


def write(parameters: Parameters, output: Path) -> dict[str, Any]:
    """Writes a data set and its manifest, both whole or not at all.

    Returns:
      The manifest.

    Raises:
      ValueError: ``prefix_tokens`` is too small for the instruction, or ``output`` would be
        the manifest itself.
      OSError: The file cannot be written.
    """
    check_length(parameters)
    counter = token_counter(parameters.model, parameters.model_revision)
    if output == manifest_path(output):
        raise ValueError(f'--output is {output}, the name of a manifest; end it in .jsonl.')
    digest, size = hashlib.sha256(), 0
    families: collections.Counter[str] = collections.Counter()
    tokens = {'prefix': _Range(), 'suffix': _Range()}
    with tempfile.TemporaryDirectory(dir=output.parent, prefix='.prefix-reuse-') as scratch:
        made = Path(scratch) / 'made'
        with made.open('wb') as file:
            for row, lengths in _rows(parameters, counter):
                line = json.dumps(row).encode() + b'\n'
                file.write(line)
                digest.update(line)
                size += len(line)
                families[row['family']] += 1
                for name, length in lengths.items():
                    tokens[name].add(length)
        shared = {name: n for name, n in families.items() if n > 1}
        manifest = {
            'file': output.name,
            'parameters': dataclasses.asdict(parameters),
            'cohort': parameters.cohort,
            'records': parameters.num_records,
            'records_of_families': parameters.records_of_families,
            'records_with_a_document_of_their_own': parameters.num_records
            - parameters.records_of_families,
            'families_with_several_records': len(shared),
            # The first of a family finds nothing that it could reuse.
            'records_whose_prefix_came_before': sum(shared.values()) - len(shared),
            'tokens_counted_by': counter.counted_by,
            'tokens': {name: found.report() for name, found in tokens.items()},
            'bytes': size,
            'sha256': digest.hexdigest(),
        }
        listing = Path(scratch) / 'manifest'
        listing.write_text(json.dumps(manifest, indent=2) + '\n', encoding='utf-8')
        made.replace(output)
        listing.replace(manifest_path(output))
    return manifest


def check_length(parameters: Parameters) -> None:
    """Looks whether instruction and document have the room that they need.

    Raises:
      ValueError: They have not.
    """
    counter = token_counter(parameters.model, parameters.model_revision)
    [instruction] = counter.tokens([_document_text.shortest_prefix('0123456789abcdef')])
    least = 2 * len(instruction)
    if parameters.prefix_tokens < least:
        raise ValueError(
            f'--prefix_tokens is {parameters.prefix_tokens}, but the instruction alone has '
            f'{len(instruction)}; give {least} or more, so that there is a document.'
        )


def manifest_path(output: Path) -> Path:
    """Where the manifest of a data set lies."""
    return output.with_suffix('.manifest.json')


def rows(parameters: Parameters, counter: TokenCounter) -> Iterator[Row]:
    """The records of a data set, in order."""
    return (row for row, _ in _rows(parameters, counter))


def _rows(parameters: Parameters, counter: TokenCounter) -> Iterator[tuple[Row, dict[str, int]]]:
    """The records, and how many tokens the parts of each have."""
    families = list(enumerate(_families(parameters)))
    prefixes: dict[str, tuple[str, int]] = {}
    width = len(str(parameters.num_records - 1))
    for start in range(0, len(families), _TOGETHER):
        block = families[start : start + _TOGETHER]
        prefixes = _prefixes(parameters, counter, {family for _, family in block}, prefixes)
        suffixes = [
            _document_text.suffix(i, random.Random(f'{parameters.seed}/statement-{i}'))
            for i, _ in block
        ]
        lengths = [len(found) for found in counter.tokens(suffixes)]
        for (i, family), suffix, suffix_tokens in zip(block, suffixes, lengths, strict=True):
            prefix, prefix_tokens = prefixes[family]
            row = {
                'id': f'{parameters.cohort}-{i:0{width}}',
                'family': family,
                'cohort': parameters.cohort,
                'prompt': prefix + suffix,
            }
            yield row, {'prefix': prefix_tokens, 'suffix': suffix_tokens}


def _families(parameters: Parameters) -> list[str]:
    """The family of each record: rounds over all families, each in an order of its own.

    Equal rounds would give each engine behind a round-robin router the same families again and
    again, wherever the number of engines divides theirs.
    """
    chance = random.Random(f'{parameters.seed}/order')
    drawn: list[int] = []
    while len(drawn) < parameters.records_of_families:
        turn = list(range(parameters.num_families))
        chance.shuffle(turn)
        if drawn and turn[0] == drawn[-1]:
            turn.append(turn.pop(0))
        drawn += turn
    drawn = drawn[: parameters.records_of_families]
    alone = parameters.num_records - len(drawn)
    from_family = [True] * len(drawn) + [False] * alone
    chance.shuffle(from_family)
    names = {
        True: iter(f'{_SHARED}{number}' for number in drawn),
        False: iter(f'{_ALONE}{number}' for number in range(alone)),
    }
    return [next(names[shared]) for shared in from_family]


def _prefixes(
    parameters: Parameters,
    counter: TokenCounter,
    families: Iterable[str],
    known: Mapping[str, tuple[str, int]],
) -> dict[str, tuple[str, int]]:
    """The prefix of each family and its tokens; those that may be wanted again are kept."""
    kept = {name: found for name, found in known.items() if name.startswith(_SHARED)}
    missing = sorted(set(families) - kept.keys())
    texts = []
    for family in missing:
        chance = random.Random(f'{parameters.seed}/{family}')
        name = f'{chance.getrandbits(64):016x}'
        texts.append(
            _document_text.prefix(name, parameters.prefix_tokens * _CHARACTERS_PER_TOKEN, chance)
        )
    cut = counter.cut(texts, parameters.prefix_tokens)
    lengths = [len(found) for found in counter.tokens(cut)]
    return kept | dict(zip(missing, zip(cut, lengths, strict=True), strict=True))


class _Range:
    """The least, mean and most of some numbers."""

    def __init__(self) -> None:
        self._found: collections.Counter[int] = collections.Counter()

    def add(self, number: int) -> None:
        self._found[number] += 1

    def report(self) -> dict[str, float]:
        return {
            'least': min(self._found),
            'mean': sum(n * times for n, times in self._found.items()) / self._found.total(),
            'most': max(self._found),
        }


if __name__ == '__main__':
    sys.exit(main())
