"""A child with knobs in its environment.

Once it is ready it prints one JSON line: ``argv``, ``env``, ``fds`` and ``grandchild``. Then it
waits for a signal. It ends by itself after two minutes, whatever the test forgot.

STARTUP_DELAY: seconds until it is ready.
IGNORE_SIGTERM: not empty: SIGTERM does nothing.
SIGTERM_EXIT_CODE: SIGTERM ends it with that exit status.
SPAWN_GRANDCHILD_IN_OWN_SESSION: not empty: it has a descendant that it is not the parent
  of any more (double fork), in a session of its own, that ignores SIGTERM.
MEMORY_MIB: it has filled that much memory.
EXIT_CODE: not empty: it ends by itself when it is ready, with that exit status.
"""

# It starts faster without pathlib, and printing is how it answers.
# ruff: noqa: PTH110, PTH115, PTH123, PTH208, T201

from __future__ import annotations

import json
import os
import signal
import sys
import time

LIFETIME_S = 120


def initial_environment() -> dict[str, str]:
    """As it was given: this interpreter may have added a locale to its own copy."""
    with open('/proc/self/environ') as file:
        return dict(entry.split('=', 1) for entry in file.read().split('\0') if entry)


def grandchild() -> int:
    """Forks twice and returns the process id of the second fork."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.alarm(LIFETIME_S)
            os.write(write_end, str(os.getpid()).encode())
            os.close(write_end)
            while True:
                signal.pause()
        os._exit(0)
    os.close(write_end)
    os.wait()
    with open(read_end) as file:
        return int(file.read())


def main() -> None:
    signal.alarm(LIFETIME_S)
    knobs = os.environ
    fds = {name: os.readlink(f'/proc/self/fd/{name}') for name in ('0', '1', '2')}
    others = [name for name in os.listdir('/proc/self/fd') if name not in fds]
    others = [name for name in others if os.path.exists(f'/proc/self/fd/{name}')]  # not listdir's
    if knobs.get('IGNORE_SIGTERM'):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if on_term := knobs.get('SIGTERM_EXIT_CODE'):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(int(on_term)))
    report = {
        'argv': sys.argv,
        'env': initial_environment(),
        'fds': fds,
        'other_fds': others,
        'grandchild': grandchild() if knobs.get('SPAWN_GRANDCHILD_IN_OWN_SESSION') else None,
    }
    time.sleep(float(knobs.get('STARTUP_DELAY') or 0))
    _memory = b'x' * (int(knobs.get('MEMORY_MIB') or 0) << 20)
    print(json.dumps(report), flush=True)
    if at_once := knobs.get('EXIT_CODE'):
        sys.exit(int(at_once))
    while True:
        signal.pause()


if __name__ == '__main__':
    main()
