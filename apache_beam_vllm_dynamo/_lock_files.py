"""Files of this user on this machine that one holder at a time has locked, and who that is.

A lock is an flock, so that the kernel gives it back however its holders end. The files stay:
to remove one that somebody is about to lock would give two the same thing.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apache_beam_vllm_dynamo._child_io import keep_from_forks
from apache_beam_vllm_dynamo.errors import StartError


def lock_directory() -> Path:
    """The directory of this user's locks on this machine.

    Raises:
      StartError: There is something else by its name, or it cannot be made.
    """
    path = Path(tempfile.gettempdir()) / f'apache-beam-vllm-dynamo-{os.getuid()}'
    with _explained(path):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        state = path.lstat()
    # In a directory that everybody may write to, the name may have been taken by somebody else.
    if not path.is_dir() or path.is_symlink() or state.st_uid != os.getuid():
        raise StartError(f'{path} is not a directory of this user; remove it, or set TMPDIR.')
    return path


class LockFile:
    """One of them, open; a fork of this process does not keep it.

    Args:
      path: Where it is; it is made where it is missing.

    Raises:
      StartError: It cannot be made; later, it cannot be locked or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _explained(path):
            self._file = io.FileIO(os.fspath(path), 'r+', opener=_make)
        keep_from_forks(self._file)

    @property
    def fd(self) -> int:
        """Whoever has it open, a child that inherited it too, holds the lock."""
        return self._file.fileno()

    def try_lock(self, *, shared: bool = False) -> bool:
        """Takes the lock if nobody is in the way."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with _explained(self.path):
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def write(self, **note: object) -> None:
        """Says who has the lock, for others that want it."""
        text = json.dumps({'pid': os.getpid(), **note}).encode()
        with _explained(self.path):
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, text, 0)

    def close(self) -> None:
        """Gives it back, unless a child holds it on; twice is no error."""
        self._file.close()


def read_note(path: Path) -> dict[str, Any]:
    """What the last holder of a lock has written; empty where that is not to be read."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(path.read_bytes())
        if isinstance(note, dict):
            return note
    return {}


def owner_of(path: Path) -> tuple[str, bool]:
    """Who has a lock, and whether that process, rather than its engines alone, is there."""
    note = read_note(path)
    pid, what = note.get('pid'), note.get('what')
    if not isinstance(pid, int):
        return 'another process', True
    of = f' ({what})' if what else ''
    if Path('/proc', str(pid)).exists():
        return f'process {pid}{of}', True
    return f'what process {pid}{of}, which has ended, left behind', False


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(
            f'{path}, by which processes agree on devices, cannot be used: {error.strerror}. Put '
            'that right, or set TMPDIR to a directory on a local disk, the same for all of them.'
        ) from error


def _make(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600)
