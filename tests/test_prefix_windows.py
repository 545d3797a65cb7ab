"""Batches of prompts that begin alike, in windows and in streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.window import (
    FixedWindows,
    GlobalWindow,
    IntervalWindow,
    Sessions,
    SlidingWindows,
    TimestampedValue,
)

from apache_beam_vllm_dynamo import ConfigurationError, PrefixBatchElements
from tests.support.pipelines import collect, collected
from tests.support.prefix_pipelines import (
    document_of,
    flat,
    neighbours_of_another_document,
    run,
    siblings,
)

STREAMING = PipelineOptions(['--runner=BundleBasedDirectRunner'])


class WithWindow(beam.DoFn):
    def process(
        self,
        batch: list[Any],
        window: Any = beam.DoFn.WindowParam,
        timestamp: Any = beam.DoFn.TimestampParam,
    ) -> Iterator[Any]:
        yield window, timestamp, sorted(batch)


def stamped(pair: tuple[str, float]) -> TimestampedValue[str]:
    return TimestampedValue(*pair)


@pytest.mark.parametrize(
    ('windows', 'wanted'),
    [
        (
            beam.WindowInto(FixedWindows(10)),
            [(0, 10, ['a', 'b']), (10, 20, ['c']), (20, 30, ['d'])],
        ),
        (
            beam.WindowInto(SlidingWindows(20, 10)),
            [
                (-10, 10, ['a', 'b']),
                (0, 20, ['a', 'b', 'c']),
                (10, 30, ['c', 'd']),
                (20, 40, ['d']),
            ],
        ),
        (
            # As they are before they merge, which is up to what groups them.
            beam.WindowInto(Sessions(10)),
            [(1, 11, ['a']), (2, 12, ['b']), (12, 22, ['c']), (25, 35, ['d'])],
        ),
        (
            # Groups would come in parts, and each with all that was in those before.
            beam.WindowInto(
                FixedWindows(10),
                trigger=trigger.Repeatedly(trigger.AfterCount(1)),
                accumulation_mode=trigger.AccumulationMode.ACCUMULATING,
            ),
            [(0, 10, ['a', 'b']), (10, 20, ['c']), (20, 30, ['d'])],
        ),
    ],
)
def test_batches_are_of_one_window_and_in_it(windows: Any, wanted: list[Any]) -> None:
    elements = [('a', 1), ('b', 2), ('c', 12), ('d', 25)]
    found = run(
        elements, beam.Map(stamped), windows, PrefixBatchElements(), beam.ParDo(WithWindow())
    )
    expected = [(IntervalWindow(start, end), batch) for start, end, batch in wanted]
    assert sorted((w, batch) for w, _, batch in found) == sorted(expected)
    assert all(timestamp == window.max_timestamp() for window, timestamp, _ in found)


def test_what_is_grouped_afterwards_is_grouped_by_window() -> None:
    elements = [('a', 1), ('b', 2), ('c', 12), ('d', 25)]
    found = run(
        elements,
        beam.Map(stamped),
        beam.WindowInto(Sessions(12)),
        PrefixBatchElements(),
        beam.FlatMap(),
        beam.Map(lambda element: ('key', element)),
        beam.GroupByKey(),
        beam.MapTuple(lambda _, group: sorted(group)),
    )
    assert sorted(found) == [['a', 'b', 'c'], ['d']]


def test_without_windows_a_batch_is_in_the_global_one() -> None:
    [(window, timestamp, batch)] = run(['a', 'b'], PrefixBatchElements(), beam.ParDo(WithWindow()))
    assert window == GlobalWindow()
    assert timestamp == window.max_timestamp()
    assert batch == ['a', 'b']


def streamed(stream: TestStream, *transforms: Any) -> list[Any]:
    collected.clear()
    with beam.Pipeline(options=STREAMING) as pipeline:
        out: Any = pipeline | stream
        for index, transform in enumerate(transforms):
            out = out | f'{index}' >> transform
        _ = out | 'collect' >> beam.Map(collect)
    return list(collected)


def test_a_batch_of_a_stream_goes_out_when_it_is_full_or_has_waited() -> None:
    stream = (
        TestStream()
        .add_elements(['same 1', 'same 2', 'same 3'])
        .advance_processing_time(2)
        .add_elements(['same 4'])
        .advance_processing_time(30)
        .add_elements(['same 5', 'same 6', 'same 7', 'same 8', 'same 9'])
        .advance_watermark_to_infinity()
    )
    transform = PrefixBatchElements(max_batch_size=4, max_batch_duration_secs=10, num_keys=1)
    found = streamed(stream, transform)
    assert sorted(map(len, found)) == [1, 4, 4]
    assert sorted(flat(found)) == [f'same {index}' for index in range(1, 10)]


def test_siblings_of_a_stream_meet_while_others_have_batches_of_their_own() -> None:
    prompts = siblings(6)
    stream = TestStream()
    for start in range(0, len(prompts), 7):
        stream = stream.add_elements(prompts[start : start + 7])
    found = streamed(stream.advance_watermark_to_infinity(), PrefixBatchElements())
    assert sorted(flat(found)) == sorted(prompts)
    batches = defaultdict(set)
    for index, batch in enumerate(found):
        for prompt in batch:
            batches[document_of(prompt)].add(index)
        assert neighbours_of_another_document(batch) == len(set(map(document_of, batch))) - 1
    assert all(len(those) == 1 for those in batches.values())
    assert len(found) > 10


def test_batches_of_a_stream_are_of_one_window() -> None:
    stream = (
        TestStream()
        .add_elements([TimestampedValue(text, at) for text, at in (('a', 1), ('b', 2), ('c', 12))])
        .advance_watermark_to(15)
        .add_elements([TimestampedValue('d', 16)])
        .advance_watermark_to_infinity()
    )
    found = streamed(
        stream,
        beam.WindowInto(FixedWindows(10)),
        PrefixBatchElements(num_keys=1, max_batch_duration_secs=1000),
        beam.ParDo(WithWindow()),
    )
    assert sorted((window.start, batch) for window, _, batch in found) == [
        (0, ['a', 'b']),
        (10, ['c', 'd']),
    ]


def test_windows_that_merge_are_refused_for_a_stream() -> None:
    stream = TestStream().add_elements(['a']).advance_watermark_to_infinity()
    with pytest.raises(ConfigurationError, match=r'windows merge \(Sessions\).* window after the'):
        streamed(stream, beam.WindowInto(Sessions(10)), PrefixBatchElements())
