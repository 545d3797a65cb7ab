"""Files of prompts, read and checked before anything is started for them."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import zlib
from collections.abc import Iterator

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems

from benchmarks._arm_pipeline import Row, parse_prompt


@dataclasses.dataclass(frozen=True)
class PromptFile:
    """What is in the file or files of a pattern.

    Attributes:
      files: How many files.
      records: How many prompts.
      cohorts: How many of each cohort, in order of appearance.
      sha256: Of all bytes, in the order of the files' names.
    """

    files: int
    records: int
    cohorts: dict[str, int]
    sha256: str


def find(pattern: str) -> list[str]:
    """The files of a pattern.

    Raises:
      ValueError: There is none.
    """
    try:
        [match] = FileSystems.match([pattern])
    except (BeamIOError, ValueError) as error:
        raise ValueError(f'{pattern} cannot be looked up: {error}') from error
    if not match.metadata_list:
        raise ValueError(f'there is no file {pattern}')
    return sorted(metadata.path for metadata in match.metadata_list)


def examine(pattern: str) -> PromptFile:
    """Reads the prompts of a pattern, anywhere that Beam reads, and counts them.

    Raises:
      ValueError: There is no such file, it holds no prompt, or a line is no prompt; the text
        names the file and the line.
    """
    digest = hashlib.sha256()
    cohorts: collections.Counter[str] = collections.Counter()
    paths = find(pattern)
    for path in paths:
        for _, line, row in _lines(path):
            digest.update(line)
            if row is not None:
                cohorts[row['cohort']] += 1
    if not cohorts:
        raise ValueError(f'{pattern} holds no prompts; each line must be like {{"prompt": "…"}}.')
    return PromptFile(len(paths), cohorts.total(), dict(cohorts), digest.hexdigest())


def prompts(pattern: str) -> Iterator[Row]:
    """The prompts of a pattern, one by one.

    Raises:
      ValueError: As for :func:`examine`.
    """
    for path in find(pattern):
        yield from (row for _, _, row in _lines(path) if row is not None)


def _lines(path: str) -> Iterator[tuple[int, bytes, Row | None]]:
    """Number, bytes and prompt of each line; ``None`` for a blank one."""
    try:
        with FileSystems.open(path) as file:
            for number, line in enumerate(iter(file.readline, b''), 1):
                try:
                    text = line.decode()
                    yield number, line, parse_prompt(text) if text.strip() else None
                except ValueError as error:  # which a UnicodeDecodeError is, too
                    raise ValueError(f'line {number} of {path}: {error}') from error
    except (BeamIOError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f'{path} cannot be read: {error}') from error
