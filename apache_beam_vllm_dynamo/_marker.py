"""Finding the processes of a child when nobody is left who could know them.

Every child has a token in its environment and its descendants inherit it. The token also
says who the owner is, so that what a killed owner *and* a killed shim left behind can be
told from what is in use. A process that has replaced its environment is not found.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import signal
import time
from collections.abc import Callable, Mapping

MARKER = 'APACHE_BEAM_VLLM_DYNAMO_CHILD'  # the environment variable that holds the token

# setproctitle writes a new title over the place where the kernel shows the environment; with
# this variable it confines itself to the arguments.
READABLE_ENVIRON = {'SPT_NOENV': '1'}

SWEEP_BOUND_S = 2.0  # killed processes are gone within milliseconds, large ones in a second or two
SWEEP_PAUSE_S = 0.01

_SHIM = os.fsencode(pathlib.Path(__file__).with_name('_lifeline.py'))
_ENTRY = os.fsencode(f'\0{MARKER}=')


def new_token() -> str:
    """A token that nobody else has, of a child of this process."""
    return f'{os.getpid()}.{start_ticks(os.getpid())}.{secrets.token_hex(8)}'


def kill_marked(
    token: str, timeout_s: float = SWEEP_BOUND_S, known: Mapping[int, int | None] | None = None
) -> tuple[int, ...]:
    """Kills every process that carries `token`, for at most `timeout_s` seconds.

    Args:
      token: The token.
      timeout_s: How long it may take, in seconds.
      known: Others that have been killed and are waited for, with their :func:`start_ticks`.

    Returns:
      The process ids of those that are still there.
    """
    return _kill_all(lambda _, found: found == token, timeout_s, known or {})


def orphans() -> tuple[int, ...]:
    """Every process that carries a token whose owner is gone.

    Those of a shim that lives are left to it: it ends them in good order and removes what they
    leave. Only what shares the PID namespace of this process is looked at: elsewhere the owner's
    process id would mean another process.
    """
    return _found(_orphaned())


def kill_orphans(timeout_s: float = SWEEP_BOUND_S) -> tuple[int, ...]:
    """Kills every process that :func:`orphans` finds, for at most `timeout_s` seconds.

    Returns:
      The process ids of those that are still there.
    """
    return _kill_all(_orphaned(), timeout_s, {})


def _orphaned() -> Callable[[str, str], bool]:
    """Tells orphans, by what shims there are at this moment."""
    own = _pid_namespace('self')
    # One that is stopped ends nothing, and nobody is left who would let it go on.
    guarded = {
        token
        for pid, token in _marked()
        if _is_shim(pid) and not (is_stopped(int(pid)) and _owner_is_gone(token))
    }
    return lambda pid, token: (
        token not in guarded and _pid_namespace(pid) == own and _owner_is_gone(token)
    )


def _kill_all(
    matches: Callable[[str, str], bool], timeout_s: float, known: Mapping[int, int | None]
) -> tuple[int, ...]:
    deadline = time.monotonic() + timeout_s
    killed = dict(known)
    while True:
        for pid in _found(matches):
            killed.setdefault(pid, start_ticks(pid))
            with contextlib.suppress(OSError):  # it has ended by itself
                os.kill(pid, signal.SIGKILL)
        # The kernel takes the environment first of all, and the memory of a GPU last: a process
        # that is found no more may still have that for a second or two.
        left = tuple(pid for pid, ticks in killed.items() if exists(pid, ticks))
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(SWEEP_PAUSE_S)


def _found(matches: Callable[[str, str], bool]) -> tuple[int, ...]:
    return tuple(int(pid) for pid, token in _marked() if matches(pid, token))


def _marked() -> list[tuple[str, str]]:
    """The process id and the token of each marked process but this one."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            _, entry, rest = (b'\0' + path.read_bytes()).partition(_ENTRY)
            if entry and path.parent.name != str(os.getpid()):
                found.append((path.parent.name, os.fsdecode(rest.partition(b'\0')[0])))
    return found


def cpu_ticks(pid: int) -> int | None:
    """The CPU time that a process has used, in clock ticks; ``None`` when there is none."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields is not None else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; a debugger that holds one does not count."""
    fields = _stat(pid)
    return fields is not None and fields[0] == b'T'


def exists(pid: int, ticks: int | None = None) -> bool:
    """Whether there is a process of that id that is not only waiting to be collected.

    Args:
      pid: The process id.
      ticks: Its :func:`start_ticks`, where the id may have gone to another process.
    """
    fields = _stat(pid)
    if fields is None or (ticks is not None and int(fields[19]) != ticks):
        return False
    # What the first thread had in common with others that are still ending is still there.
    return fields[0] not in (b'Z', b'X') or int(fields[17]) > 1


def _is_shim(pid: str) -> bool:
    try:
        arguments = pathlib.Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')
    except OSError:
        return False
    # python -I -S SCRIPT …
    return arguments[3:4] == [_SHIM]


def _owner_is_gone(token: str) -> bool:
    owner = re.fullmatch(r'(\d+)\.(\d+)\..*', token)
    return owner is not None and start_ticks(int(owner[1])) != int(owner[2])


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; ``None`` when there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else None


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on; ``None`` when there is no process."""
    try:
        stat = pathlib.Path(f'/proc/{pid}/stat').read_bytes()
    except OSError:
        return None
    # The second field, in parentheses, may hold anything.
    return stat.rpartition(b')')[2].split()


def _pid_namespace(pid: str) -> str | None:
    try:
        return str(pathlib.Path(f'/proc/{pid}/ns/pid').readlink())
    except OSError:
        return None
