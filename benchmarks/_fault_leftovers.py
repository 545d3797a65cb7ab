"""What a stack has left behind on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path

from apache_beam_vllm_dynamo._private_directory import PREFIX

LOOK_INTERVAL_S = 0.05


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """How many of each there are."""

    processes: int
    sockets: int
    directories: int


NOTHING = Leftovers(0, 0, 0)


def look(temporary: str) -> Leftovers:
    """What is left of the runs that had this temporary directory to themselves."""
    under = os.path.join(temporary, PREFIX)  # noqa: PTH118 - it is searched for as text
    sockets = Path('/proc/net/unix').read_text().count(under)
    # Unlike rglob(), walk() passes over what goes in this very moment.
    files = [
        name
        for directory, _, names in os.walk(temporary)
        for name in names
        if Path(directory, name).is_socket()
    ]
    directories = list(Path(temporary).glob(f'{PREFIX}*'))
    return Leftovers(_processes(temporary), max(sockets, len(files)), len(directories))


def wait_until_none(temporary: str, bound_s: float) -> Leftovers:
    """Looks until nothing is left or the time is over, and returns what there was at last."""
    deadline = time.monotonic() + bound_s
    while (left := look(temporary)) != NOTHING and time.monotonic() < deadline:
        time.sleep(LOOK_INTERVAL_S)
    return left


def belongs_to(temporary: str, environment: bytes) -> bool:
    """Whether a process with this environment has the temporary directory, or one inside it."""
    wanted = (f'TMPDIR={temporary}\0'.encode(), f'TMPDIR={temporary}/'.encode())
    return any(entry in environment for entry in wanted)


def _processes(temporary: str) -> int:
    count = 0
    for path in Path('/proc').glob('[0-9]*/environ'):
        with contextlib.suppress(OSError):
            count += belongs_to(temporary, path.read_bytes())
    return count
