"""Prompts that begin alike, sent through pipelines in the test's own process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from tests.support.pipelines import IN_PROCESS, collect, collected

DOCUMENTS = [''.join(random.Random(seed).choices('abcdefghij ', k=3000)) for seed in range(20)]
SYSTEM = 'You are as helpful as you can be. ' * 100


def siblings(number: int = 10, system: str = '') -> list[str]:
    """Questions on each document, so that no two on one document follow each other."""
    return [
        f'{system}{document} question {index}' for index in range(number) for document in DOCUMENTS
    ]


def document_of(prompt: str) -> str:
    return prompt.removeprefix(SYSTEM)[:3000]


def run(
    elements: Sequence[Any], *transforms: Any, options: PipelineOptions = IN_PROCESS
) -> list[Any]:
    collected.clear()
    with beam.Pipeline(options=options) as pipeline:
        out: Any = pipeline | beam.Create(elements)
        for index, transform in enumerate(transforms):
            out = out | f'{index}' >> transform
        _ = out | 'collect' >> beam.Map(collect)
    return list(collected)


def flat(batches: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def neighbours_of_another_document(prompts: list[str]) -> int:
    return sum(document_of(a) != document_of(b) for a, b in itertools.pairwise(prompts))
