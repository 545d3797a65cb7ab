"""What a prompt begins with, and which key elements get that begin alike."""

from __future__ import annotations

import array
import functools
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from apache_beam.ml.inference import vllm_inference as upstream
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from apache_beam_vllm_dynamo import (
    ChatRequest,
    CompletionRequest,
    ConfigurationError,
    OpenAIChatMessage,
)
from apache_beam_vllm_dynamo import _prefixes as prefixes

BLOCK = 16  # tokens
BLOCK_BYTES = 4 * BLOCK
texts = st.text(max_size=200)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=100)
messages = st.builds(
    OpenAIChatMessage, st.sampled_from(['system', 'user', 'assistant']), st.text(max_size=50)
)
conversations = st.lists(messages, max_size=5)
json_like: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)
elements: st.SearchStrategy[Any] = (
    texts
    | token_ids
    | conversations
    | st.builds(CompletionRequest, texts | token_ids)
    | st.builds(ChatRequest, conversations)
    | json_like
)


def path(element: object, block_size: int = BLOCK) -> bytes:
    return prefixes.path_of(prefixes.prompt_bytes(element), block_size)


def common(one: bytes, other: bytes) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@functools.cache
def words(seed: int, size: int) -> str:
    return ''.join(random.Random(seed).choices('abcdefghij ', k=size))


@given(texts, texts, texts)
def test_texts_that_begin_alike_have_bytes_that_begin_alike(same: str, a: str, b: str) -> None:
    one, other = prefixes.prompt_bytes(same + a), prefixes.prompt_bytes(same + b)
    assert common(one, other) >= 1 + len(same.encode())
    assert (one == other) == (a == b)


@given(token_ids, token_ids, token_ids)
def test_token_ids_take_four_bytes_each(same: list[int], a: list[int], b: list[int]) -> None:
    one, other = prefixes.prompt_bytes(same + a), prefixes.prompt_bytes(tuple(same + b))
    assert len(one) == 1 + 4 * len(same + a)
    assert common(one, other) >= 1 + 4 * len(same)
    assert (one == other) == (a == b)


@given(conversations.filter(bool), messages)
def test_a_conversation_that_goes_on_begins_like_the_one_before(
    before: list[OpenAIChatMessage], added: OpenAIChatMessage
) -> None:
    one, other = prefixes.prompt_bytes(before), prefixes.prompt_bytes([*before, added])
    assert common(one, other) >= len(one) - 1
    assert one != other


@given(conversations.filter(bool))
def test_a_conversation_is_the_same_in_whatever_form_it_comes(
    conversation: list[OpenAIChatMessage],
) -> None:
    wanted = prefixes.prompt_bytes(conversation)
    as_dicts = [message.to_dict() for message in conversation]
    turned = [dict(reversed(message.items())) for message in as_dicts]
    beams = [upstream.OpenAIChatMessage(**message) for message in as_dicts]
    for same in (as_dicts, turned, beams, tuple(conversation), ChatRequest(conversation)):
        assert prefixes.prompt_bytes(same) == wanted


def test_an_answer_that_is_sent_back_is_looked_at_as_it_is_sent() -> None:
    answer = ChatCompletionMessage(role='assistant', content='yes')
    assert prefixes.prompt_bytes([answer]) == prefixes.prompt_bytes([answer.to_dict()])


def test_a_request_is_its_prompt_and_its_arguments_make_no_difference() -> None:
    for prompt in ('text', [1, 2, 3]):
        request = CompletionRequest(prompt, {'max_tokens': 3})
        assert prefixes.prompt_bytes(request) == prefixes.prompt_bytes(prompt)


def test_tools_come_before_the_messages_as_chat_templates_have_them() -> None:
    tools = [{'type': 'function', 'function': {'name': 'look_up', 'parameters': {'x': 'y' * 500}}}]
    one, other = (
        prefixes.prompt_bytes(ChatRequest([{'role': 'user', 'content': text}], {'tools': tools}))
        for text in ('one', 'other')
    )
    without = prefixes.prompt_bytes([{'role': 'user', 'content': 'one'}])
    assert common(one, other) > 500
    assert common(one, without) == 1


def test_images_count_where_they_stand() -> None:
    def asked(image: str, question: str) -> bytes:
        parts = [
            {'type': 'image_url', 'image_url': {'url': f'data:image/png;base64,{image}'}},
            {'type': 'text', 'text': question},
        ]
        return prefixes.prompt_bytes([{'role': 'user', 'content': parts}])

    assert common(asked('A' * 900, 'what?'), asked('A' * 900, 'where?')) > 900
    assert common(asked('A' * 900, 'what?'), asked('B' * 900, 'what?')) < 100


@given(st.lists(elements, min_size=2, max_size=2))
def test_kinds_do_not_mix(pair: list[Any]) -> None:
    one, other = map(prefixes.prompt_bytes, pair)
    assert one[:1] in b'stc?'
    if isinstance(pair[0], str) and not isinstance(pair[1], (str, CompletionRequest)):
        assert one[:1] != other[:1]


nothing: Any = None


class Odd:
    def to_dict(self) -> object:
        raise RuntimeError('no')


@pytest.mark.parametrize(
    'make',
    [
        object,
        Odd,
        lambda: None,
        lambda: b'\xff',
        lambda: float('nan'),
        lambda: {1, 2},
        lambda: [-1],
        lambda: [2**32],
        lambda: ['a', 1],
        lambda: '\ud800',
        lambda: [{'role': Odd()}],
        lambda: ChatRequest(nothing, nothing),
        lambda: CompletionRequest(nothing),
        lambda: itself([]),
    ],
)
def test_what_is_no_request_is_left_to_the_handler(make: Callable[[], Any]) -> None:
    assert prefixes.prompt_bytes(make()) == prefixes.prompt_bytes(make())


def itself(items: list[Any]) -> list[Any]:
    items.append(items)
    return items


def test_what_lies_far_inside_is_not_looked_at() -> None:
    far = 'x' * 10_000_000
    for one, other in (
        (far + '1', far + '2'),
        ([{'role': 'user', 'content': far + '1'}], [{'role': 'user', 'content': far + '2'}]),
        ([7] * 20_000 + [1], [7] * 20_000 + [2]),
    ):
        assert prefixes.prompt_bytes(one) == prefixes.prompt_bytes(other)
        assert len(prefixes.prompt_bytes(one)) <= 1 + prefixes.PROMPT_LIMIT_BYTES
        assert len(path(one)) < 300


@given(st.integers(0, 16), st.integers(0, 15), st.sampled_from([BLOCK, 32]))
def test_paths_share_a_digest_for_each_block_that_prompts_share(
    blocks: int, more: int, block_size: int
) -> None:
    same = list(range(blocks * block_size + more))
    one, other = path([*same, 1, *same], block_size), path([*same, 2, *same], block_size)
    assert prefixes.shared_bytes(one, other) == blocks * prefixes.DIGEST_BYTES


@given(st.integers(16 * BLOCK_BYTES, 60_000))
def test_no_more_than_an_eighth_of_what_is_shared_goes_unseen(shared: int) -> None:
    same = 'x' * shared
    digests = prefixes.shared_bytes(path(same + 'a' * 9000), path(same + 'b' * 9000))
    seen = prefixes._lengths(BLOCK)[digests // prefixes.DIGEST_BYTES - 1]
    assert shared * 7 / 8 - BLOCK_BYTES < seen <= shared


@given(elements)
def test_a_path_is_the_same_each_time_and_in_whole_digests(element: Any) -> None:
    assert path(element) == path(element)
    assert path(element)
    assert len(path(element)) % prefixes.DIGEST_BYTES == 0


def test_a_path_is_the_same_in_every_process_whatever_its_hash_seed() -> None:
    assert path(['a prompt', {'b': 1, 'a': 'x' * 100}]).hex() == 'd7ed99c5f0ece8d5'


def test_a_name_may_be_a_string_bytes_a_number_or_token_ids() -> None:
    names = ['1', b'1', 1, [1], -1, array.array('I', [1, 2]), '\ud800']
    assert len({prefixes.name_bytes(name) for name in names}) == len(names)
    assert prefixes.name_bytes([1, 2]) == prefixes.name_bytes(array.array('I', [1, 2]))


@pytest.mark.parametrize('name', [None, 1.5, {'a': 1}, ['a'], [-1], [2**32], object()])
def test_anything_else_is_no_name(name: object) -> None:
    with pytest.raises(ConfigurationError, match=f'prefix_fn gave a {type(name).__name__}; it mu'):
        prefixes.name_bytes(name)


def test_keys_and_elements_of_each_grow_together() -> None:
    assert [prefixes.keys_for(n) for n in (0, 1, 3, 4, 10_000, 1_000_000)] == [
        1,
        1,
        1,
        2,
        100,
        1000,
    ]
    assert prefixes.keys_for(10**12) == prefixes.MAX_KEYS


def sizes(separators: list[bytes], paths: list[bytes]) -> list[int]:
    counted = Counter(prefixes.range_of(separators, p) for p in paths)
    return [counted[number] for number in range(len(separators) + 1)]


@given(st.lists(elements, max_size=60), st.integers(1, 20))
def test_no_range_gets_more_than_twice_its_share(mixture: list[Any], num_keys: int) -> None:
    paths = [path(element) + prefixes.tie_break() for element in mixture]
    separators = prefixes.splitters(paths, num_keys)
    assert separators == sorted(set(separators))
    assert len(separators) < num_keys
    assert sum(sizes(separators, paths)) == len(paths)
    share = len(paths) / min(num_keys, max(1, len(paths)))
    assert max(sizes(separators, paths)) <= 2 * share + 1


@pytest.mark.parametrize(
    'prompt', [lambda _: 'equal', lambda i: words(0, 9000) + f' {i}', lambda i: f'{i} unique']
)
def test_one_beginning_of_all_is_spread_over_all_keys(prompt: Callable[[int], str]) -> None:
    paths = [path(prompt(i)) + prefixes.tie_break() for i in range(2000)]
    found = sizes(prefixes.splitters(paths, 40), paths)
    assert found == [50] * 40


def test_a_range_begins_where_a_family_does_not_where_its_first_known_member_does() -> None:
    known = [b'aaaa1111', b'aaaa5555', b'aaaa7777', b'bbbb5555', b'bbbb7777']
    assert prefixes.splitters(known, 2) == [b'bbbb']
    assert prefixes.range_of([b'bbbb'], b'bbbb1111') == 1
    assert prefixes.splitters(known[:3], 2) == [b'aaaa5555']
    assert prefixes.splitters(known[:1], 2) == []


def test_ranges_are_parted_between_families() -> None:
    system = words(0, 5000)
    families = [
        [path(system + words(f + 1, 3000) + f' {i}') + prefixes.tie_break() for i in range(20)]
        for f in range(100)
    ]
    paths = list(itertools.chain(*families))
    separators = prefixes.splitters(paths, 40)
    assert len(sizes(separators, paths)) == 40
    assert all(len({prefixes.range_of(separators, p) for p in family}) == 1 for family in families)


def test_a_sample_is_enough() -> None:
    paths = [path(words(i % 300, 3000) + f' {i}') + prefixes.tie_break() for i in range(9000)]
    separators = prefixes.splitters(random.Random(0).sample(paths, 1000), 30)
    found = sizes(separators, paths)
    assert len(found) == 30
    assert max(found) < 2.5 * 9000 / 30
    ranges = defaultdict(set)
    for index, one in enumerate(paths):
        ranges[index % 300].add(prefixes.range_of(separators, one))
    assert sum(len(numbers) for numbers in ranges.values()) <= 300 + 2


def stream_keys(prompts: list[str], num_keys: int) -> list[int]:
    hot = prefixes.HotPrefixes(num_keys)
    return [hot.key(path(prompt) + prefixes.tie_break()) for prompt in prompts]


def shuffled(prompts: list[str], seed: int = 0) -> list[str]:
    return random.Random(seed).sample(prompts, len(prompts))


@pytest.mark.parametrize(
    'prompt', [lambda _: 'equal', lambda i: words(0, 9000) + f' {i}', lambda i: f'{i} unique']
)
@pytest.mark.parametrize('num_keys', [1, 50, 64])
def test_one_beginning_of_a_stream_is_spread_over_all_keys(
    prompt: Callable[[int], str], num_keys: int
) -> None:
    found = Counter(stream_keys([prompt(i) for i in range(6000)], num_keys)[1000:])
    assert set(found) == set(range(num_keys))
    assert max(found.values()) < 2.5 * 5000 / num_keys


def test_families_of_a_stream_have_a_key_each_whatever_all_of_it_begins_with() -> None:
    system = words(0, 5000)
    prompts = shuffled([system + words(i % 200, 3000) + f' {i}' for i in range(8000)])
    keys: dict[str, Counter[int]] = defaultdict(Counter)
    for prompt, key in list(zip(prompts, stream_keys(prompts, 64), strict=True))[2000:]:
        keys[prompt[5000:8000]][key] += 1
    assert len(keys) == 200
    together = sum(max(of_family.values()) for of_family in keys.values())
    assert together > 0.95 * 6000
    assert len({key for of_family in keys.values() for key in of_family}) > 50


def test_a_hot_family_gets_as_many_keys_as_its_share_asks_for() -> None:
    hot, rest = words(1, 3000), [words(i, 3000) for i in range(2, 200)]
    prompts = shuffled(
        [hot + f' {i}' for i in range(2000)] + [r + f' {i}' for i in range(30) for r in rest]
    )
    keys = stream_keys(prompts, 64)
    late = list(zip(prompts, keys, strict=True))[2000:]
    assert 16 <= len({key for prompt, key in late if prompt.startswith(hot)}) <= 32
    assert max(Counter(keys).values()) < 4 * len(prompts) / 64


def test_senders_that_see_the_same_stream_agree() -> None:
    prompts = [words(0, 3000) + words(i % 100, 2000) + f' {i}' for i in range(8000)]
    one, other = (
        dict(zip(order, stream_keys(order, 64), strict=True))
        for order in (shuffled(prompts, 1), shuffled(prompts, 2))
    )
    late = set(shuffled(prompts, 1)[4000:]) & set(shuffled(prompts, 2)[4000:])
    assert sum(one[p] == other[p] for p in late) > 0.9 * len(late)


def test_a_stream_is_counted_in_bounded_memory_and_what_was_hot_is_forgotten() -> None:
    hot = prefixes.HotPrefixes(64)
    for index in range(30_000):
        hot.key(path(words(0, 3000) + f' {index}') + prefixes.tie_break())
        assert len(hot) <= hot.LATEST
    for index in range(60_000):
        hot.key(path(f'{index} unique') + prefixes.tie_break())
    keys = {hot.key(path(words(0, 3000) + f' {i}') + prefixes.tie_break()) for i in range(20)}
    assert len(keys) == 1


@given(st.integers(0, 500), st.integers(1, 60))
def test_parts_are_few_even_and_within_the_bound(count: int, most: int) -> None:
    parts = [list(part) for part in prefixes.evenly(range(count), most)]
    assert list(itertools.chain(*parts)) == list(range(count))
    assert len(parts) == -(-count // most)
    if parts:
        assert max(map(len, parts)) <= most
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
