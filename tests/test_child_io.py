"""Lines are made of whatever a child writes, in bounded memory."""

from __future__ import annotations

import pytest

from apache_beam_vllm_dynamo._child_io import LINE_CHARS, LineAssembler


def lines_of(data: bytes, step: int) -> list[str]:
    """Feeds the bytes in pieces of `step`."""
    assembler = LineAssembler()
    pieces = [data[i : i + step] for i in range(0, len(data), step)]
    return [line for piece in pieces for line in assembler.feed(piece)] + assembler.flush()


@pytest.mark.parametrize('step', [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ('data', 'lines'),
    [
        (b'', []),
        (b'one\ntwo\n', ['one', 'two']),
        (b'one\n\n\ntwo', ['one', '', '', 'two']),
        (b'dos\r\nunix\n', ['dos', 'unix']),
        (b' 10%\r 50%\r100%\ndone\n', ['100%', 'done']),
        (b' 10%\r 50%\r\r\n', [' 50%']),
        (b' 10%\r 50%\r', [' 50%']),
        ('naïve €\n'.encode(), ['naïve €']),
        (b'\xff\xfe ok\n', ['\ufffd\ufffd ok']),
        (b'cut \xe2\x82', ['cut \ufffd']),
        (b'nul \x00 esc \x1b[0m\n', ['nul \x00 esc \x1b[0m']),
        (b'x' * (LINE_CHARS + 7) + b'\nnext\n', ['x' * LINE_CHARS, 'next']),
        (b'x' * (3 * LINE_CHARS) + b'\rshort\n', ['short']),
    ],
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(
    data: bytes, lines: list[str], step: int
) -> None:
    """Line ends of all kinds, progress bars, broken UTF-8, binary, and endless lines."""
    assert lines_of(data, step) == lines


def test_an_unfinished_line_can_be_seen_and_stays_bounded() -> None:
    """A megabyte without an end of line is cut like any other line."""
    assembler = LineAssembler()
    assembler.feed(b'load 50%')
    assert assembler.pending == 'load 50%'
    for _ in range(16):
        assembler.feed(b'\0' * 65536)
    assert len(assembler.pending) == LINE_CHARS
    assert len(assembler.flush()[0]) == LINE_CHARS
    assert assembler.pending == ''
