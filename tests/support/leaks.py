"""What a test may leave behind: nothing that is ours."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

from apache_beam_vllm_dynamo import _loop
from benchmarks._fault_leftovers import belongs_to
from tests.support.processes import children_of, fds_of

# For what ends on its own a moment after a test.
PATIENCE_S = 5.0

# What the names of our threads have in common; Beam's own outlive its pipelines.
_OURS = re.compile(r'supervisor|probe|reader|vllm-dynamo|injector')

_NOT_OURS = ('socket:', 'anon_inode:', os.path.realpath(sys.prefix))


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What this process has at one moment.

    Attributes:
      children: Its direct children, those that have ended and were not waited for included.
      threads: The names of our threads, and how many there are of each.
      descriptors: Which files and pipes are open. Not sockets and what waits for them, which
        Beam has no way to close for its proxies and gRPC, and not the files of libraries.
    """

    children: frozenset[int]
    threads: Counter[str]
    descriptors: Counter[str]

    def beyond(self, before: Footprint) -> str:
        """What has come since, in words; nothing where all of it is gone."""
        came = {
            'children': sorted(self.children - before.children),
            'threads': sorted((self.threads - before.threads).elements()),
            'descriptors': sorted((self.descriptors - before.descriptors).elements()),
        }
        return ', '.join(f'{what}: {items}' for what, items in came.items() if items)


def footprint() -> Footprint:
    """What this process has now."""
    return Footprint(
        children=frozenset(children_of(os.getpid())),
        threads=Counter(t.name for t in threading.enumerate() if _OURS.search(t.name)),
        descriptors=Counter(
            re.sub(r':\[\d+\]$', '', leads_to)
            for leads_to in fds_of().values()
            if not leads_to.startswith(_NOT_OURS)
        ),
    )


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fails where this process has more of anything after the block than before."""
    before = footprint()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while leaked := footprint().beyond(before):
        if time.monotonic() > deadline:
            raise AssertionError(f'left behind by the test: {leaked}')
        time.sleep(0.01)


def open_what_opens_once() -> None:
    """Has the library of the event loop open the pipe that it keeps for the process's life."""
    _loop._new_loop().close()


def processes_with(temporary: str) -> list[str]:
    """The command lines of other processes that have this temporary directory."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
        with contextlib.suppress(OSError):
            environment = path.read_bytes()
            if path.parent.name != str(os.getpid()) and belongs_to(temporary, environment):
                command = path.with_name('cmdline').read_bytes()
                found.append(command.decode(errors='replace').replace('\0', ' '))
    return found
