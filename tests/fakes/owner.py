"""An owner of one fake child, which gets its environment; prints its pid once it is ready.

Usage: owner.py MODE, where MODE is

wait: it waits to be killed.
return: it ends by itself, without a stop.
fork: it has a plain fork that outlives it.
multiprocessing: it has a fork by multiprocessing that outlives it.

In the last two modes the second number printed is the fork's pid.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import sys

from apache_beam_vllm_dynamo._process import ChildSpec, ManagedProcess

LIFETIME_S = 120


def wait() -> None:
    signal.alarm(LIFETIME_S)
    while True:
        signal.pause()


def fork(mode: str) -> int:
    if mode == 'fork':
        pid = os.fork()
        if pid == 0:
            wait()
        return pid
    process = multiprocessing.get_context('fork').Process(target=wait)
    process.start()
    assert process.pid is not None
    return process.pid


def main(mode: str) -> None:
    argv = (sys.executable, '-S', str(pathlib.Path(__file__).with_name('child.py')))
    child = ManagedProcess(ChildSpec('fake', argv, dict(os.environ), None, stop_grace_s=60.0))
    child.start()
    while not child.log_tail():
        child.wait(0.01)
    forked = fork(mode) if mode in ('fork', 'multiprocessing') else 0
    print(child.pid, forked, flush=True)  # noqa: T201
    if mode != 'return':
        wait()


if __name__ == '__main__':
    main(sys.argv[1])
