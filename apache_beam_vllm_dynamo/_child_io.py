"""The pipes between a child and its owner: what may hold them, and lines out of bytes."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import re
import threading
import weakref
from typing import Protocol

LINE_CHARS = 4000  # a line is cut here: the longest useful ones are printed configurations


class LineAssembler:
    """Bytes to lines in bounded memory.

    A carriage return goes back to the start of the line, as on a terminal, so that of a
    progress bar only the last state is kept.
    """

    def __init__(self) -> None:
        self.pending = ''  # the line that is not finished
        self._overwrite = False
        self._decode = codecs.getincrementaldecoder('utf-8')('replace').decode

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        lines = []
        for piece in re.findall(r'\n|\r|[^\r\n]+', self._decode(data, final)):
            if piece == '\n':
                lines.append(self.pending)
            if piece == '\n' or (self._overwrite and piece != '\r'):
                self.pending = ''
            self._overwrite = piece == '\r'
            if piece not in '\r\n':
                self.pending += piece[: LINE_CHARS - len(self.pending)]
        return lines

    def flush(self) -> list[str]:
        lines = self.feed(b'', final=True)
        rest, self.pending = self.pending, ''
        return [*lines, rest] if rest else lines


class Closable(Protocol):
    """What holds a descriptor."""

    def close(self) -> None:
        """Closes it; closing twice is no error."""


# Descriptors that a fork of the owner must not keep: with a copy of the control pipe's write end
# it would hold the lifeline, with a copy of the status pipe's the reader would wait for it.
_files: weakref.WeakSet[Closable] = weakref.WeakSet()
_fork_lock = threading.RLock()  # re-entrant: garbage collection may run anything on any thread


def pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """A pipe that no exec and no fork inherits, each end closed by its owner's stack."""
    _guard_forks()
    with _fork_lock:  # no fork between the creation and the registration
        read_end, write_end = os.pipe()
        ends = io.FileIO(read_end, 'r'), io.FileIO(write_end, 'w')
        _files.update(ends)
    reader.callback(ends[0].close)
    writer.callback(ends[1].close)
    return ends


def keep_from_forks(file: Closable) -> None:
    """Has a fork of this process close its copy of ``file``, for a lock on it is not its own."""
    _guard_forks()
    with _fork_lock:
        _files.add(file)


@functools.cache
def _guard_forks() -> None:
    """Registers the hooks, once, and at the first start: an import must change nothing."""
    os.register_at_fork(
        before=_fork_lock.acquire,
        after_in_parent=_fork_lock.release,
        after_in_child=_in_fork,
    )


def _in_fork() -> None:
    for file in list(_files):
        file.close()
    _fork_lock.release()
