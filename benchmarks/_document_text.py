"""Made-up documents, what is asked about them, and what an answer to it looks like."""

from __future__ import annotations

import random
import re
from collections.abc import Collection

LABELS = ('supported', 'contradicted', 'unmentioned')

# The name comes first of all, so that prompts about two documents share not even a KV block.
_PREFIX = """\
Register {name}.
You compare statements with a document. Read the whole document below, then the statement after \
it, and decide what the document says about the statement. Answer with one word alone: \
"supported" if the document says so, "contradicted" if it says otherwise, "unmentioned" if it \
says nothing about it. Use nothing but the document.

Document {name}:
"""
_SUFFIX = '\n\nStatement {number}: {statement}\nAnswer:'

_PEOPLE = (
    'The keeper', 'A clerk', 'The miller', 'Her nephew', 'The captain', 'A carpenter', 'The mayor',
    'The printer', 'An apprentice', 'The widow', 'A teacher', 'The smith', 'The surveyor',
)  # fmt: skip
_DEEDS = (
    'repaired', 'sold', 'borrowed', 'painted', 'measured', 'found', 'ordered', 'lost', 'carried',
    'inspected', 'returned', 'listed', 'weighed',
)  # fmt: skip
_THINGS = (
    'the brass lantern', 'two sacks of grain', 'an iron gate', 'the harbor map', 'a box of nails',
    'the church bell', 'seven barrels', 'the red ledger', 'a new rope', 'the old boat',
    'a pair of scales', 'the clock', 'some window glass',
)  # fmt: skip
_PLACES = (
    'at the mill', 'near the bridge', 'in the north room', 'by the river', 'at the market',
    'behind the school', 'on the pier', 'in the valley', 'at the station', 'under the tower',
)  # fmt: skip
_TIMES = (
    'in the spring', 'on a Monday', 'before the storm', 'after the harvest', 'in the first week',
    'at noon', 'during the winter', 'on the last day', 'in the year of the flood', 'twice',
)  # fmt: skip


def prefix(name: str, characters: int, chance: random.Random) -> str:
    """Instruction and document of at least so many characters, told apart by ``name``."""
    text = _PREFIX.format(name=name)
    sentences = []
    length = len(text)
    while length < characters:
        sentences.append(_sentence(chance))
        length += len(sentences[-1]) + 1
    return text + ' '.join(sentences)


def shortest_prefix(name: str) -> str:
    """The instruction alone."""
    return _PREFIX.format(name=name)


def suffix(number: int, chance: random.Random) -> str:
    """What one prompt asks about its document."""
    return _SUFFIX.format(number=number, statement=_sentence(chance))


def answers_with(text: str, labels: Collection[str]) -> bool:
    """Whether the first word of an answer is one of the labels, whatever its case."""
    first = re.search(r'\w+', text)
    return first is not None and first.group().lower() in labels


def _sentence(chance: random.Random) -> str:
    who, did, what, where, when = map(chance.choice, (_PEOPLE, _DEEDS, _THINGS, _PLACES, _TIMES))
    return f'{who} {did} {what} {where} {when}.'
