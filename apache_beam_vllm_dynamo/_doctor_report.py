"""What a check of this machine found, and how a table or a program is told of it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, TextIO


class Result(enum.StrEnum):
    """What a check came to."""

    OK = 'ok'
    WARNING = 'warning'
    FAILED = 'failed'


LEAST_COLUMNS = 30  # of a text that goes on below its beginning; in fewer it falls apart

_COLOURS = {Result.OK: '32', Result.WARNING: '33', Result.FAILED: '31;1'}


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
      name: What was looked at, in a word or three.
      result: What it came to.
      found: What is there.
      mend: What to do about it; empty where nothing has to be done.
      details: Further lines, such as the end of a log.
    """

    name: str
    result: Result
    found: str
    mend: str = ''
    details: tuple[str, ...] = ()

    @classmethod
    def ok(cls, name: str, found: str) -> Self:
        """Nothing to do."""
        return cls(name, Result.OK, found)

    @classmethod
    def warning(cls, name: str, found: str, mend: str) -> Self:
        """It may work, or works for a part of what the package can do."""
        return cls(name, Result.WARNING, found, mend)

    @classmethod
    def failed(cls, name: str, found: str, mend: str) -> Self:
        """It cannot work."""
        return cls(name, Result.FAILED, found, mend)


def failed_by(name: str, error: Exception) -> Check:
    """The check that ``error`` failed; its text says what was found, then what to do."""
    text, *details = str(error).splitlines()
    found, _, mend = text.partition('. ')
    return Check(
        name, Result.FAILED, found.removesuffix('.'), mend.removesuffix('.'), tuple(details)
    )


def exit_status(checks: Iterable[Check]) -> int:
    """1 where a check failed, else 0."""
    return int(any(check.result is Result.FAILED for check in checks))


def table(checks: Sequence[Check], *, colour: bool, columns: int | None = None) -> str:
    """A line for each check, a line that sums them up, and the details below.

    Args:
      checks: In the order of the lines.
      colour: Whether results are coloured, for a terminal.
      columns: How wide the terminal is, in which a long text goes on below its beginning;
        and what to do on a line of its own; ``None`` where lines may have any length.
    """
    width = max((len(check.name) for check in checks), default=0)
    lines = [_line(check, width, colour=colour, columns=columns) for check in checks]
    lines += ['', _sum(checks)]
    for check in checks:
        if check.details:
            lines += ['', f'{check.name}:', *(f'  {line}' for line in check.details)]
    return '\n'.join(lines)


def to_json(checks: Sequence[Check]) -> str:
    """The same for a program."""
    rows = [dataclasses.asdict(check) for check in checks]
    return json.dumps({'ok': exit_status(checks) == 0, 'checks': rows}, indent=2)


def wants_colour(stream: TextIO, env: Mapping[str, str]) -> bool:
    """Whether ``stream`` is a terminal whose user wants colours (https://no-color.org)."""
    return stream.isatty() and not env.get('NO_COLOR') and env.get('TERM') != 'dumb'


def gib(size_bytes: float) -> str:
    """A size for people."""
    return f'{size_bytes / 2**30:.1f} GiB'


def _line(check: Check, width: int, *, colour: bool, columns: int | None) -> str:
    # Padded before it is coloured: a terminal does not show the codes.
    result = f'{check.result:<{len(Result.WARNING)}}'
    if colour:
        result = f'\x1b[{_COLOURS[check.result]}m{result}\x1b[0m'
    text = f'{check.found}. {check.mend}' if check.mend else check.found
    indent = width + len(Result.WARNING) + 4
    if columns is not None and LEAST_COLUMNS <= columns - indent < len(text):
        wrap = textwrap.TextWrapper(
            columns - indent, break_long_words=False, break_on_hyphens=False
        ).wrap
        # What to do begins a line, so that a command stays whole where it can.
        text = f'\n{" " * indent}'.join([*wrap(check.found), *wrap(check.mend)])
    return f'{check.name:<{width}}  {result}  {text}'


def _sum(checks: Sequence[Check]) -> str:
    numbers = collections.Counter(check.result for check in checks)
    plural = 's' if numbers[Result.WARNING] > 1 else ''
    parts = [
        f'{numbers[Result.FAILED]} failed',
        f'{numbers[Result.WARNING]} warning{plural}',
        f'{numbers[Result.OK]} ok',
    ]
    return ', '.join(part for part in parts if not part.startswith('0 '))
