"""The transform that brings elements together whose prompts begin alike, in Beam pipelines."""

from __future__ import annotations

import itertools
import re
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, MaybeKeyedModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apache_beam_vllm_dynamo import (
    ChatRequest,
    CompletionRequest,
    ConfigurationError,
    LLMInference,
    OpenAIChatMessage,
    PrefixBatchElements,
    VLLMCompletionsModelHandler,
    _prefixes,
    prefix_batching,
)
from tests.support.pipelines import IN_PROCESS, collect, collected, our_metrics
from tests.support.prefix_pipelines import (
    DOCUMENTS,
    SYSTEM,
    document_of,
    flat,
    neighbours_of_another_document,
    run,
    siblings,
)
from tests.support.stacks import MODEL, simulated

THREADS = PipelineOptions(
    ['--runner=FnApiRunner', '--direct_running_mode=multi_threading', '--direct_num_workers=4']
)


def test_siblings_come_one_after_the_other_in_full_batches() -> None:
    batches = run(siblings(), PrefixBatchElements(max_batch_size=100))
    assert [len(batch) for batch in batches] == [100, 100]
    assert sorted(flat(batches)) == sorted(siblings())
    assert neighbours_of_another_document(flat(batches)) == len(DOCUMENTS) - 1


def test_what_all_of_them_begin_with_does_not_hide_the_siblings() -> None:
    prompts = siblings(system=SYSTEM)
    found = flat(run(prompts, PrefixBatchElements()))
    assert sorted(found) == sorted(prompts)
    assert neighbours_of_another_document(found) == len(DOCUMENTS) - 1


@pytest.mark.parametrize('waiting_secs', [None, 60])
def test_prompts_that_share_nothing_are_batched_all_the_same(waiting_secs: float | None) -> None:
    prompts = [f'{index} is a prompt of its own' for index in range(2000)]
    transform = PrefixBatchElements(
        max_batch_size=200, max_batch_duration_secs=waiting_secs, num_keys=8
    )
    batches = run(prompts, transform)
    assert sorted(flat(batches)) == sorted(prompts)
    assert min(map(len, batches)) >= 20
    assert max(map(len, batches)) <= 200


class InBundle(beam.DoFn):
    """Says which bundle a batch is in."""

    def start_bundle(self) -> None:
        self._bundle = uuid.uuid4().hex

    def process(self, batch: list[str]) -> Iterator[tuple[str, str]]:
        for prompt in batch:
            yield self._bundle, prompt


@pytest.mark.parametrize('system', ['', SYSTEM])
def test_siblings_meet_on_one_worker_and_no_worker_gets_them_all(system: str) -> None:
    prompts = siblings(20, system)
    found = run(
        prompts, beam.Reshuffle(), PrefixBatchElements(), beam.ParDo(InBundle()), options=THREADS
    )
    assert sorted(prompt for _, prompt in found) == sorted(prompts)
    bundles = defaultdict(set)
    for bundle, prompt in found:
        bundles[document_of(prompt)].add(bundle)
    load = Counter(bundle for bundle, _ in found)
    assert len(load) > 1
    assert max(load.values()) < 0.7 * len(prompts)
    assert sum(len(those) for those in bundles.values()) <= len(DOCUMENTS) + 3


def test_equal_prompts_are_too_many_for_one_worker_too() -> None:
    found = run(['equal'] * 1000, PrefixBatchElements(), beam.ParDo(InBundle()), options=THREADS)
    load = Counter(bundle for bundle, _ in found)
    assert sum(load.values()) == 1000
    assert max(load.values()) < 700


def test_a_name_brings_together_what_does_not_begin_alike() -> None:
    names = [f'{index} {name}' for index in range(50) for name in 'abcd']
    found = flat(run(names, PrefixBatchElements(lambda element: element[-1])))
    assert sorted(found) == sorted(names)
    assert len(list(itertools.groupby(element[-1] for element in found))) == 4


def test_the_prefix_of_a_pair_is_that_of_its_element() -> None:
    pairs = [(index, prompt) for index, prompt in enumerate(siblings())]
    batches = run(pairs, PrefixBatchElements(keyed=True))
    assert sorted(flat(batches)) == pairs
    prompts = [prompt for _, prompt in flat(batches)]
    assert neighbours_of_another_document(prompts) == len(DOCUMENTS) - 1


def test_a_single_element_among_pairs_is_named() -> None:
    with pytest.raises(Exception, match='An element is a str, but PrefixBatchElements is keyed'):
        run([('a', 'b'), 'c'], PrefixBatchElements(keyed=True))


def test_a_tokenizer_finds_whole_blocks() -> None:
    prompts: list[Any] = [*siblings(3), CompletionRequest('x'), [1, 2], [{'role': 'user'}]]
    for tokenizer in (MODEL, f'{MODEL}/tokenizer.json'):
        paths = prefix_batching._Paths(None, False, 16, tokenizer)
        one, same, other = (paths.of(prompts[index]) for index in (0, 20, 1))
        blocks = _prefixes.shared_bytes(one, same) // 4
        assert blocks > 16
        assert _prefixes.shared_bytes(one, other) == 0
    found = flat(run(prompts, PrefixBatchElements(tokenizer=MODEL)))
    assert sorted(map(str, found)) == sorted(map(str, prompts))


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(Exception, match=r"tokenizer is '/nowhere/tokenizer\.json', which cannot"):
        run(['a'], PrefixBatchElements(tokenizer='/nowhere'))


texts = st.sampled_from(DOCUMENTS) | st.text(max_size=80)
prompts_of_one_kind = st.one_of(
    st.lists(st.tuples(texts, texts).map(''.join), max_size=60),
    st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=60),
    st.lists(
        st.lists(
            st.builds(OpenAIChatMessage, st.sampled_from(['system', 'user']), texts), max_size=3
        ),
        max_size=40,
    ),
)
mixtures = st.lists(
    st.one_of(
        texts,
        st.lists(st.integers(-1, 9), max_size=40),
        st.builds(CompletionRequest, texts),
        st.builds(lambda text: ChatRequest([{'role': 'user', 'content': text}]), texts),
        st.none(),
    ),
    max_size=60,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts_of_one_kind | mixtures,
    st.integers(1, 20),
    st.none() | st.integers(1, 30),
    st.none() | st.just(60),
)
def test_nothing_is_lost_or_doubled_and_no_batch_is_too_large(
    elements: list[Any], max_batch_size: int, num_keys: int | None, waiting_secs: float | None
) -> None:
    transform = PrefixBatchElements(
        max_batch_size=max_batch_size, num_keys=num_keys, max_batch_duration_secs=waiting_secs
    )
    batches = run(elements, transform)
    assert Counter(map(repr, flat(batches))) == Counter(map(repr, elements))
    assert all(1 <= len(batch) <= max_batch_size for batch in batches)
    if waiting_secs is None and elements:
        largest = prefix_batching.ORDERED_BATCHES * max_batch_size
        assert len(batches) <= -(-len(elements) // max_batch_size) + -(-len(elements) // largest)


class OnlyItsOwnCoder:
    """Cannot be pickled."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def __reduce__(self) -> Any:
        raise TypeError('has a coder of its own')


class OwnCoder(beam.coders.Coder):
    def encode(self, value: OnlyItsOwnCoder) -> bytes:
        return value.prompt.encode()

    def decode(self, encoded: bytes) -> OnlyItsOwnCoder:
        return OnlyItsOwnCoder(encoded.decode())

    def is_deterministic(self) -> bool:
        return True


beam.coders.registry.register_coder(OnlyItsOwnCoder, OwnCoder)


@pytest.mark.parametrize('waiting_secs', [None, 60])
def test_elements_keep_their_coder(waiting_secs: float | None) -> None:
    made = beam.Map(OnlyItsOwnCoder).with_output_types(OnlyItsOwnCoder)
    transform = PrefixBatchElements(
        lambda element: element.prompt, max_batch_duration_secs=waiting_secs, num_keys=1
    )
    batches = run(siblings(2), made, transform, beam.Map(prompts_of))
    assert len(batches) == 1
    assert sorted(batches[0]) == sorted(siblings(2))


def prompts_of(batch: list[OnlyItsOwnCoder]) -> list[str]:
    return [element.prompt for element in batch]


def test_no_input_makes_no_batch() -> None:
    assert run([], PrefixBatchElements()) == []
    assert run([], PrefixBatchElements(max_batch_duration_secs=1)) == []


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ({'prefix_fn': 'name'}, 'prefix_fn is a str; it must be a function of an element.'),
        ({'keyed': 1}, 'keyed is 1; it must be True or False.'),
        ({'max_batch_size': 0}, 'max_batch_size is 0; it must be a whole number, 1 or more.'),
        ({'max_batch_size': 2.5}, 'max_batch_size is 2.5; it must be a whole number, 1 or more.'),
        ({'block_size': True}, 'block_size is True; it must be a whole number, 1 or more.'),
        ({'num_keys': -1}, 'num_keys is -1; it must be a whole number, 1 or more.'),
        ({'num_keys': 5000}, 'num_keys is 5000; it must be at most 4096.'),
        (
            {'max_batch_duration_secs': 0},
            'max_batch_duration_secs is 0; it must be a number of seconds above 0, 604800 (a week)',
        ),
        ({'tokenizer': ''}, "tokenizer is ''; it must be the path of the model's tokenizer.json"),
        ({'tokenizer': 'x', 'prefix_fn': len}, 'tokenizer and prefix_fn exclude each other'),
    ],
)
def test_a_wrong_argument_is_named_with_the_mend(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match='^' + re.escape(message)):
        PrefixBatchElements(**arguments)


def test_much_is_not_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_batching, 'ORDERED_BYTES', 10_000)
    batching = prefix_batching._BatchDoFn(100)
    batching.start_bundle()
    for element, held in (('x' * 3000, 4), ([1] * 500, 3), (CompletionRequest('x' * 6000), 2)):
        described = [(bytes([i]), element, None) for i in range(held)]
        [out] = batching.process((b'key', iter(described)))
        assert out.value == [element] * held
    assert list(batching.finish_bundle()) == []


def completions() -> VLLMCompletionsModelHandler:
    return VLLMCompletionsModelHandler(MODEL, use_dynamo=True, dynamo_runtime_config=simulated(1))


@pytest.mark.usefixtures('nothing_left')
def test_handlers_take_the_batches_and_their_results_are_all_there() -> None:
    prompts = siblings(2)
    pairs = list(enumerate(prompts))
    arguments = {'max_tokens': 1}
    collected.clear()
    with beam.Pipeline(options=IN_PROCESS) as pipeline:
        single = pipeline | 'prompts' >> beam.Create(prompts)
        keyed = pipeline | 'pairs' >> beam.Create(pairs)

        def infer(handler: Any) -> Any:
            return RunInference(
                handler, inference_args=arguments, model_identifier='one server for all'
            )

        answers = {
            'plain': single
            | 'p1' >> PrefixBatchElements()
            | 'r1' >> infer(completions().with_no_batching()),
            'keyed': keyed
            | 'p2' >> PrefixBatchElements(keyed=True)
            | 'r2' >> infer(KeyedModelHandler(completions()).with_no_batching()),
            'maybe keyed': keyed
            | 'p3' >> PrefixBatchElements(keyed=True)
            | 'r3' >> infer(MaybeKeyedModelHandler(completions().with_no_batching())),
            'single': single
            | 'p4' >> PrefixBatchElements()
            | beam.FlatMap()
            | LLMInference(completions(), arguments, model_identifier='one server for all'),
        }
        for name, results in answers.items():
            _ = (
                results
                | f'name {name}' >> beam.Map(named, name)
                | f'collect {name}' >> beam.Map(collect)
            )
    found = defaultdict(list)
    for name, result in collected:
        found[name].append(result)
    assert sorted(result.example for result in found['plain']) == sorted(prompts)
    assert sorted(result.example for result in found['single']) == sorted(prompts)
    assert sorted((key, result.example) for key, result in found['keyed']) == pairs
    assert sorted((key, result.example) for key, result in found['maybe keyed']) == pairs
    assert our_metrics(pipeline.result)['inference_request_batch_size'].max == len(prompts)


def named(result: Any, name: str) -> tuple[str, Any]:
    return name, result
