"""The transform that brings elements together whose prompts begin alike.

An engine computes the beginning of a prompt once and has it in its cache for all that share
it, if they come to the same worker and soon. :class:`PrefixBatchElements` sees to both.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import apache_beam as beam
from apache_beam.coders import Coder, registry
from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.typehints import typehints
from apache_beam.utils.windowed_value import WindowedValue

from apache_beam_vllm_dynamo import _prefixes
from apache_beam_vllm_dynamo._checks import check_count, check_seconds
from apache_beam_vllm_dynamo.errors import ConfigurationError, MissingDependencyError
from apache_beam_vllm_dynamo.messages import CompletionRequest, size_bytes

DEFAULT_MAX_BATCH_SIZE = 1024  # what four engines run at once
DEFAULT_MAX_BATCH_DURATION_SECS = 1.0
# Each fills batches of its own while a stream flows: with more of them batches are smaller.
DEFAULT_STREAM_KEYS = 64
DEFAULT_BLOCK_SIZE = 16  # vLLM's own default on GPUs

# What is put in order at once. More of it joins more families that were parted, but a runner
# cannot give to an idle worker what another one has read.
ORDERED_BATCHES = 2
ORDERED_BYTES = 64 << 20
_KEY_BYTES = 4


class PrefixBatchElements(beam.PTransform[Any, Any]):
    """Makes batches of elements whose prompts begin alike, wherever they come from.

    A shuffle brings such elements to the same worker and puts them next to each other. The
    batches are lists, for a handler that makes none itself::

        prompts | PrefixBatchElements() | RunInference(handler.with_no_batching())

    For a transform that takes elements one by one, they keep the order of their batch::

        prompts | PrefixBatchElements() | beam.FlatMap() | LLMInference(handler)

    Elements are what the handlers take; others need a ``prefix_fn``. Nothing has to be known
    of how long the shared beginnings are. Elements that share nothing are batched with
    others, and what very many begin with, such as one system prompt for all, is spread over
    the workers, by what comes after it.

    *Bounded input* is read to its end first. Its prompts, as far as they are looked at (64
    KiB), are put in order over all workers, by a sample of up to 32,768 of them, and parted
    into keys of like numbers of elements. Batches are full but for the last ones of a bundle.

    *Unbounded input*, and all input if ``max_batch_duration_secs`` is given, is batched under
    a fixed number of keys as it comes. A batch goes out when it is full, when its first
    element has waited for that long, or at the end of its window. What is hot is learnt on
    the way.

    The elements of a batch are of one window, which the batch is in; one of several sliding
    windows is in a batch of each. The timestamps of elements end here: of bounded input, a
    batch has that of the end of its window, as from ``beam.BatchElements``; else that of
    the element or of the timer with which it went out. Pass them on in a key if they are
    needed.

    Args:
      prefix_fn: Gives, of an element, what its prompt begins with, or any name that all have
        which begin alike, such as that of a document: a string, bytes, an integer or token
        ids. Elements of one name are put in the order of their prompts. Unset, the prompt
        itself is looked at: of a text its bytes, of chat the tools and messages, of token ids
        whole KV blocks.
      keyed: Whether an element is ``(key, element)``. The key has no influence on the batches.
        The handler for them is ``KeyedModelHandler(handler).with_no_batching()``, in this
        order: the other way round Beam makes batches of batches.
      max_batch_size: The most elements of a batch, 1,024 unless given. At least as many as the
        engines of a worker run at once keep them busy.
      max_batch_duration_secs: How long an element may wait for others, in seconds. Unset, 1
        for unbounded input.
      num_keys: Over how many keys the elements are spread, and so over how many workers at
        most. Unset, the square root of the number of elements, at most 4,096, for bounded
        input; 64 for unbounded input.
      block_size: Tokens of a KV block of the engines, 16 unless given; the bytes of a text are
        taken four for a token.
      tokenizer: The path of the model's ``tokenizer.json``, or of a directory that holds it,
        at any path that Beam can read on the worker: texts, but not chats, are looked at by
        whole KV blocks too. It needs the package ``tokenizers`` on the workers and takes some
        milliseconds a prompt, which bytes do not.

    Raises:
      ConfigurationError: An argument cannot work; when it is applied, unbounded input in windows
        that merge.
    """

    def __init__(
        self,
        prefix_fn: Callable[[Any], Any] | None = None,
        *,
        keyed: bool = False,
        max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        max_batch_duration_secs: float | None = None,
        num_keys: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        _check_functions(prefix_fn, tokenizer)
        if not isinstance(keyed, bool):
            raise ConfigurationError(f'keyed is {keyed!r}; it must be True or False.')
        check_count('max_batch_size', max_batch_size)
        check_count('block_size', block_size)
        if max_batch_duration_secs is not None:
            check_seconds('max_batch_duration_secs', max_batch_duration_secs)
        if num_keys is not None:
            check_count('num_keys', num_keys)
            if num_keys > _prefixes.MAX_KEYS:
                raise ConfigurationError(
                    f'num_keys is {num_keys}; it must be at most {_prefixes.MAX_KEYS}.'
                )
        self._paths = _Paths(prefix_fn, keyed, block_size, tokenizer)
        self._max_batch_size = max_batch_size
        self._max_batch_duration_secs = max_batch_duration_secs
        self._num_keys = num_keys

    def expand(self, elements: beam.PCollection[Any]) -> Any:
        """Makes the batches.

        Raises:
          ConfigurationError: Unbounded input is in windows that merge.
        """
        element_type = elements.element_type or typehints.Any
        if elements.is_bounded and self._max_batch_duration_secs is None:
            return self._by_ranges(elements, element_type)
        return self._by_hot_prefixes(elements, element_type)

    def _by_ranges(self, elements: beam.PCollection[Any], element_type: Any) -> Any:
        described = elements | 'Describe' >> beam.ParDo(
            _DescribeDoFn(self._paths)
        ).with_output_types(typehints.Tuple[bytes, element_type, typehints.Any])
        if not elements.windowing.is_default():
            # The windows travel with the elements: whatever their triggers are, nothing is
            # grouped in parts or twice.
            described = described | 'Regardless of windows' >> beam.WindowInto(GlobalWindows())
        paths = described | 'Paths' >> beam.Map(operator.itemgetter(0)).with_output_types(bytes)
        count = paths | 'Count' >> beam.combiners.Count.Globally()
        separators = (
            paths
            | 'Sample' >> beam.combiners.Sample.FixedSizeGlobally(_prefixes.SAMPLE_SIZE)
            | 'Split' >> beam.Map(_separators, self._num_keys, beam.pvalue.AsSingleton(count))
        )
        grouped = (
            described
            | 'Key'
            >> beam.Map(_by_range, beam.pvalue.AsSingleton(separators)).with_output_types(
                typehints.Tuple[bytes, described.element_type]
            )
            | 'Shuffle' >> beam.GroupByKey()
        )
        batch = _InWindows(_BatchDoFn(self._max_batch_size), elements.windowing)
        return grouped | 'Batch' >> batch.with_output_types(typehints.List[element_type])

    def _by_hot_prefixes(self, elements: beam.PCollection[Any], element_type: Any) -> Any:
        if elements.windowing.windowfn.is_merging():
            raise ConfigurationError(
                'The input is unbounded, or max_batch_duration_secs is given, and its windows '
                f'merge ({type(elements.windowing.windowfn).__name__}), which no batch can wait '
                'for: window after the inference instead.'
            )
        # GroupIntoBatches has a coder of its own choice, which may not fit the elements.
        coder = registry.get_coder(element_type)
        return (
            elements
            | 'Key'
            >> beam.ParDo(
                _KeyDoFn(self._paths, self._num_keys or DEFAULT_STREAM_KEYS, coder)
            ).with_output_types(typehints.Tuple[bytes, typehints.Tuple[bytes, bytes]])
            | 'Shuffle'
            >> beam.GroupIntoBatches(
                self._max_batch_size,
                self._max_batch_duration_secs or DEFAULT_MAX_BATCH_DURATION_SECS,
            )
            | 'Order' >> beam.Map(_ordered, coder).with_output_types(typehints.List[element_type])
        )


def _check_functions(prefix_fn: object, tokenizer: object) -> None:
    if prefix_fn is not None and not callable(prefix_fn):
        raise ConfigurationError(
            f'prefix_fn is a {type(prefix_fn).__name__}; it must be a function of an element.'
        )
    if tokenizer is None:
        return
    if not isinstance(tokenizer, str) or not tokenizer:
        raise ConfigurationError(
            f"tokenizer is {tokenizer!r}; it must be the path of the model's tokenizer.json, or "
            'of a directory that holds it.'
        )
    if prefix_fn is not None:
        raise ConfigurationError(
            'tokenizer and prefix_fn exclude each other; prefix_fn may give token ids.'
        )


@dataclasses.dataclass(frozen=True)
class _Paths:
    """What gives the path of an element."""

    prefix_fn: Callable[[Any], Any] | None
    keyed: bool
    block_size: int
    tokenizer: str | None

    def of(self, element: Any) -> bytes:
        if self.keyed:
            if not isinstance(element, tuple) or len(element) != 2:  # noqa: PLR2004 - a pair
                raise ConfigurationError(
                    f'An element is a {type(element).__name__}, but PrefixBatchElements is keyed: '
                    'an element must be a pair (key, element); or leave keyed out.'
                )
            element = element[1]
        path = b''
        if self.prefix_fn is not None:
            name = _prefixes.name_bytes(self.prefix_fn(element))
            path = _prefixes.path_of(name, self.block_size)
        content = element.prompt if isinstance(element, CompletionRequest) else element
        if self.tokenizer is not None and isinstance(content, str):
            content = _tokenizer(self.tokenizer)(content[: _prefixes.PROMPT_LIMIT_BYTES])
        else:
            content = element
        path += _prefixes.path_of(_prefixes.prompt_bytes(content), self.block_size)
        return path + _prefixes.tie_break()


@functools.cache
def _tokenizer(path: str) -> Callable[[str], list[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(
            'The tokenizer of PrefixBatchElements needs the package tokenizers: pip install it '
            'on the workers, or leave tokenizer out.'
        ) from error
    if not path.endswith('.json'):
        path = FileSystems.join(path, 'tokenizer.json')
    try:
        with FileSystems.open(path) as file:
            tokenizer = Tokenizer.from_str(file.read().decode('utf-8'))
    except (OSError, ValueError, BeamIOError) as error:
        raise ConfigurationError(
            f'tokenizer is {path!r}, which cannot be read on this worker: {error}. Give a '
            'tokenizer.json at a path that the workers can open, gs://… for example.'
        ) from error
    return lambda text: list(tokenizer.encode(text).ids)


class _DescribeDoFn(beam.DoFn):
    """Puts the path before an element, and the window behind it."""

    def __init__(self, paths: _Paths) -> None:
        super().__init__()
        self._paths = paths

    def process(
        self, element: Any, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[tuple[bytes, Any, Any]]:
        own_window = None if isinstance(window, GlobalWindow) else window
        yield self._paths.of(element), element, own_window


def _separators(sample: list[bytes], num_keys: int | None, count: int) -> list[bytes]:
    return _prefixes.splitters(sample, num_keys or _prefixes.keys_for(count))


def _by_range(described: Any, separators: list[bytes]) -> tuple[bytes, Any]:
    number = _prefixes.range_of(separators, described[0])
    return number.to_bytes(_KEY_BYTES), described


class _InWindows(beam.ParDo):
    """A ParDo that gives elements the windows that they had before."""

    def __init__(self, do_fn: beam.DoFn, windowing: Windowing) -> None:
        super().__init__(do_fn)
        self._windowing = windowing

    def get_windowing(self, _inputs: Any) -> Windowing:
        return self._windowing


class _BatchDoFn(beam.DoFn):
    """Puts what a bundle brings in order, under whatever keys, and cuts it into batches."""

    def __init__(self, max_batch_size: int) -> None:
        super().__init__()
        self._max_batch_size = max_batch_size
        self._held: list[tuple[bytes, Any, Any]] = []
        self._held_bytes = 0

    def start_bundle(self) -> None:
        self._held, self._held_bytes = [], 0

    def process(self, grouped: tuple[bytes, Iterable[Any]]) -> Iterator[WindowedValue]:
        for described in grouped[1]:
            self._held.append(described)
            self._held_bytes += _held_bytes(described[1])
            if (
                len(self._held) >= ORDERED_BATCHES * self._max_batch_size
                or self._held_bytes >= ORDERED_BYTES
            ):
                yield from self._batches()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        yield from self._batches()

    def _batches(self) -> Iterator[WindowedValue]:
        self._held.sort(key=operator.itemgetter(0))
        by_window: dict[Any, list[Any]] = defaultdict(list)
        for _, element, window in self._held:
            by_window[window or GlobalWindow()].append(element)
        self._held, self._held_bytes = [], 0
        for window, elements in by_window.items():
            for batch in _prefixes.evenly(elements, self._max_batch_size):
                yield WindowedValue(batch, window.max_timestamp(), (window,))


def _held_bytes(element: Any) -> int:
    content = element.prompt if isinstance(element, CompletionRequest) else element
    if isinstance(content, list) and content and isinstance(content[0], int):
        return 8 * len(content)  # not one by one
    return size_bytes(element)


class _KeyDoFn(beam.DoFn):
    """Puts a key before an element, by the path and what was hot until now."""

    def __init__(self, paths: _Paths, num_keys: int, coder: Coder) -> None:
        super().__init__()
        self._paths = paths
        self._num_keys = num_keys
        self._coder = coder
        self._hot: _prefixes.HotPrefixes | None = None

    def setup(self) -> None:
        self._hot = _prefixes.HotPrefixes(self._num_keys)

    def process(self, element: Any) -> Iterator[tuple[bytes, tuple[bytes, bytes]]]:
        assert self._hot is not None
        path = self._paths.of(element)
        key = self._hot.key(path).to_bytes(_KEY_BYTES)
        yield key, (path, self._coder.encode(element))


def _ordered(grouped: tuple[bytes, Iterable[tuple[bytes, bytes]]], coder: Coder) -> list[Any]:
    return [coder.decode(encoded) for _, encoded in sorted(grouped[1])]
