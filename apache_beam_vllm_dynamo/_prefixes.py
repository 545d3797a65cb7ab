"""Pure: what a prompt begins with, and which key elements get that begin alike.

Of an element only its *path* is looked at: digests of its first part at growing lengths. Two
prompts that share a beginning share the beginning of their paths, so paths in order are
prompts in order, at a fiftieth of the bytes and without a word of what they say.

How long the shared part is nobody has to know. The digest of one fixed length parts families
that share less than that, and throws together all that share more; a path is read as far as
it takes to tell elements apart that need not be together.
"""

from __future__ import annotations

import array
import bisect
import functools
import hashlib
import itertools
import math
import numbers
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from apache_beam_vllm_dynamo.errors import ConfigurationError
from apache_beam_vllm_dynamo.messages import ChatRequest, CompletionRequest, message_fields

DIGEST_BYTES = 4
# No further into a prompt is looked: about 16,000 tokens, beyond what is commonly shared.
PROMPT_LIMIT_BYTES = 65_536
TOKEN_BYTES = 4  # of an id; a token of English text has about as many letters
# The first blocks have a digest each; after them each length is an eighth longer than the one
# before, so that at most that share of a common beginning goes unseen.
_SINGLE_BLOCKS = 16
_GROWTH = 8
_JSON_LIKE = (str, bytes, bytearray, Mapping, Sequence, int, float, type(None))

MAX_KEYS = 4096
# Of so many paths the bounds of all keys are chosen: about 6 MB in the one place that does it.
SAMPLE_SIZE = 8 * MAX_KEYS


def prompt_bytes(element: object) -> bytes:
    """The bytes that stand for what the engine's prompt begins with; the first one for its kind.

    Equal prompts have equal bytes, and prompts that begin alike bytes that begin alike. An
    element that is no request has some too: what is wrong with it is for the handler to say.
    """
    try:
        return _prompt_bytes(element)
    except Exception:  # noqa: BLE001 - an element may be anything, and so may what it raises
        return b'?' + type(element).__name__.encode()


def name_bytes(name: object) -> bytes:
    """The bytes that stand for what a user's function gave.

    Raises:
      ConfigurationError: It is neither a string, bytes, an integer nor a list of token ids.
    """
    if isinstance(name, str):
        return b's' + _encoded(name)
    if isinstance(name, bytes):
        return b'b' + name[:PROMPT_LIMIT_BYTES]
    if isinstance(name, numbers.Integral):
        return b'i%d' % int(name)
    ids = _token_ids(name)
    if ids is None:
        raise ConfigurationError(
            f'prefix_fn gave a {type(name).__name__}; it must give what the prompt begins with, '
            'or a name that all have whose prompts begin alike: a string, bytes, an integer or a '
            'list of token ids.'
        )
    return ids


def path_of(data: bytes, block_size: int) -> bytes:
    """The digests of ever longer beginnings, in whole KV blocks, and at the end that of all.

    Args:
      data: What :func:`prompt_bytes` or :func:`name_bytes` gave.
      block_size: Tokens of a KV block; of text, as many times four bytes.
    """
    digest = hashlib.blake2b(data[:1], digest_size=DIGEST_BYTES)
    content = memoryview(data)[1:]
    digests, start = [], 0
    for end in _lengths(block_size):
        if end >= len(content):
            break
        digest.update(content[start:end])
        digests.append(digest.copy().digest())
        start = end
    digest.update(content[start:])
    digests.append(digest.digest())
    return b''.join(digests)


def tie_break() -> bytes:
    """The end of a path, by which even equal prompts can be parted if there are too many."""
    return os.urandom(DIGEST_BYTES)


def keys_for(count: int) -> int:
    """Over how many keys so many elements are spread: as many as each of them then gets.

    The more there are, the more workers share them and the fewer families are parted.
    """
    return max(1, min(MAX_KEYS, math.isqrt(count)))


def splitters(paths: Iterable[bytes], num_keys: int) -> list[bytes]:
    """Parts all paths into ranges of like numbers, between families where that can be.

    However many begin alike, no range gets many more than another: a family that is larger
    than a range is parted by what its members go on with.

    Args:
      paths: All paths, or a random sample of them.
      num_keys: The number of ranges; there may be fewer where there are fewer paths.

    Returns:
      What separates each range from the one before.
    """
    ordered = sorted(paths)
    num_keys = min(num_keys, len(ordered))
    found: list[bytes] = []
    for index in range(1, num_keys):
        # Each is looked for in a stretch of its own, around where ranges of one size would meet.
        middle = index * len(ordered) // num_keys
        first = -((1 - 2 * index) * len(ordered) // (2 * num_keys))
        last = -((-1 - 2 * index) * len(ordered) // (2 * num_keys))
        shared, _, at = min(
            (shared_bytes(ordered[i - 1], ordered[i]), abs(i - middle), i)
            for i in range(first, last)
        )
        if ordered[at - 1] != ordered[at]:
            found.append(ordered[at][: shared + DIGEST_BYTES])
    return found


def range_of(separators: Sequence[bytes], path: bytes) -> int:
    """The number of the range that a path lies in, from 0."""
    return bisect.bisect_right(separators, path)


def shared_bytes(path: bytes, other: bytes) -> int:
    """How long the common beginning of two paths is, in whole digests."""
    shortest = min(len(path), len(other))
    for start in range(0, shortest, DIGEST_BYTES):
        if path[start : start + DIGEST_BYTES] != other[start : start + DIGEST_BYTES]:
            return start
    return shortest


class HotPrefixes:
    """Chooses keys for a stream, of which nobody can know the whole.

    A key follows from the shortest beginning of a path that is not *hot*. A beginning is hot
    while more of the latest elements have it than one key should get; these are then spread,
    by what they go on with, over as many keys as their share asks for. Each sender counts for
    itself, and those that see the same stream come to the same keys. While they do not, a
    family meets under two keys instead of one; nothing else depends on it.

    Args:
      num_keys: How many keys there are.
    """

    LATEST = 8192  # elements; when so many are counted, all counts are halved
    EVIDENCE = 32  # elements; fewer say little of a share

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._seen = 0
        self._counts: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """How many beginnings are counted; no more than the latest elements."""
        return len(self._counts)

    def key(self, path: bytes) -> int:
        """The key of the next element, from 0."""
        if self._seen >= self.LATEST:
            self._forget()
        self._seen += 1
        bound = max(self.EVIDENCE, self._seen / self._num_keys)
        hot, hot_count, end = 0, self._seen, 0
        for end in range(DIGEST_BYTES, len(path) + 1, DIGEST_BYTES):
            count = self._counts[path[:end]] = self._counts[path[:end]] + 1
            if count <= bound:
                break
            hot, hot_count = end, count
        keys = math.ceil(hot_count * self._num_keys / self._seen)
        # Powers of two: while a share wavers, most elements keep their keys.
        spread = min(self._num_keys, 1 << (keys - 1).bit_length())
        return (_last_digest(path, hot) + _last_digest(path, end) % spread) % self._num_keys

    def _forget(self) -> None:
        self._seen //= 2
        kept = {path: count // 2 for path, count in self._counts.items() if count > 1}
        self._counts = Counter(kept)


def _last_digest(path: bytes, end: int) -> int:
    return int.from_bytes(path[max(end - DIGEST_BYTES, 0) : end])


@functools.cache
def _lengths(block_size: int) -> tuple[int, ...]:
    block = block_size * TOKEN_BYTES
    lengths, blocks = [block], 1
    while lengths[-1] < PROMPT_LIMIT_BYTES:
        blocks += 1 if blocks < _SINGLE_BLOCKS else blocks // _GROWTH
        lengths.append(blocks * block)
    return tuple(lengths)


def _prompt_bytes(element: object) -> bytes:
    out = bytearray()
    content = element
    if isinstance(element, CompletionRequest):
        content = element.prompt
    elif isinstance(element, ChatRequest):
        content = element.messages
        if tools := element.arguments.get('tools'):
            _write(out, tools)  # chat templates put them before the messages
    if isinstance(content, str):
        return b's' + _encoded(content)
    ids = _token_ids(content)
    if ids is not None:
        return ids
    _write(out, content)
    return b'c' + out[:PROMPT_LIMIT_BYTES]


def _encoded(text: str) -> bytes:
    # Half of a surrogate pair is no text, but the handler says so.
    return text[:PROMPT_LIMIT_BYTES].encode('utf-8', 'surrogatepass')[:PROMPT_LIMIT_BYTES]


def _token_ids(content: object) -> bytes | None:
    """Four bytes an id; ``None`` for what is no list of ids."""
    limit = PROMPT_LIMIT_BYTES // TOKEN_BYTES
    if hasattr(content, 'tolist'):  # an array, as tokenizers return them
        content = content.tolist()
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes, bytearray)):
        return None
    try:
        return b't' + array.array('I', itertools.islice(content, limit)).tobytes()
    except (TypeError, OverflowError):
        return None


def _write(out: bytearray, value: object) -> None:
    """Appends a JSON-like value, so that equal ones are equal and like ones begin alike."""
    if len(out) >= PROMPT_LIMIT_BYTES:
        return
    if not isinstance(value, _JSON_LIKE):
        fields = message_fields(value)
        value = type(value).__name__ if fields is None else fields
    if isinstance(value, str):
        out += _encoded(value)
    elif isinstance(value, (bytes, bytearray)):
        out += value[:PROMPT_LIMIT_BYTES]
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _write(out, str(key))
            _write(out, value[key])
    elif isinstance(value, Sequence):
        for item in value:
            _write(out, item)
    else:
        number = value is None or isinstance(value, (int, float))
        out += (repr(value) if number else type(value).__name__).encode()
    out += b'\0'  # so that no two values run into each other


def evenly(items: Sequence[object], most: int) -> Iterator[Sequence[object]]:
    """Cuts into the fewest parts that hold no more than ``most``, all of about one size."""
    parts = -(-len(items) // most)
    for part in range(parts):
        yield items[part * len(items) // parts : (part + 1) * len(items) // parts]
