"""Makes a directory that does not outlive those who use it; a plain script, standard library only.

Usage::

    python -I -S _keeper.py CONTROL_FD DIRECTORY

It makes the directory, of this user alone, locks it (a shared flock), and says so with a byte on
its output. When the control pipe's only write end is closed, which the kernel does when the owner
ends, however it ends, it waits for all others who have a lock on the directory and removes it. So
there is no moment at which a killed owner leaves a directory that nobody knows of.
"""

# Importing pathlib or shutil would cost milliseconds at every start.
# ruff: noqa: PTH102

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5  # of a wait for processes that take as long as they like to end


def main(control_fd: int, directory: str) -> None:
    # Like a shim it outlives what ends its owner.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.mkdir(directory, 0o700)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.write(1, b'.')
    os.close(1)
    os.read(control_fd, 1)
    pause_s = FIRST_PAUSE_S
    while os.fstat(lock).st_nlink:  # else the owner has removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        else:
            import shutil

            shutil.rmtree(directory, ignore_errors=True)
            return


if __name__ == '__main__':
    main(int(sys.argv[1]), sys.argv[2])
