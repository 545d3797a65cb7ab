"""One stack at a time on a device: a lock for each, held by whoever owns the processes.

The owner of a stack takes the locks and hands them to the shims of its processes
(``hold_fds``), so that they are held until the last process is gone, also after the owner was
killed. A stack of equal settings never meets them: it shares the one that runs
(``_sharing.py``). So who finds a device taken has other settings, or comes when a predecessor
is still ending; and that one is waited for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from apache_beam_vllm_dynamo._lock_files import LockFile, lock_directory, owner_of
from apache_beam_vllm_dynamo.errors import DevicesBusyError, StartError

_LOGGER = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.2  # a predecessor takes seconds to end
SAY_INTERVAL_S = 30.0  # a wait of minutes must not look like a hang
# An owner that lives may be about to end; one of the same job stays as long as this process.
LIVE_OWNER_PATIENCE_S = 60.0
_MEND = (
    'Give each handler devices of its own (gpu_devices or cpu_cores of its engines, or '
    'CUDA_VISIBLE_DEVICES in its env_vars), or the same model and settings, which share one server.'
)


class Holder(Protocol):
    """A stack that has devices to itself."""

    @property
    def description(self) -> str:
        """What it is, for the messages of others."""

    @property
    def ending(self) -> bool:
        """Whether it is about to give its devices back."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a stack needs of a device.

    Attributes:
      lock: The name of the device's lock, the same whatever the device is called by.
      device: What messages call the device, e.g. ``"GPU 0"``.
      shared: Whether it is content to have it with others that are so too.
    """

    lock: str
    device: str
    shared: bool = False


_here_lock = threading.RLock()  # re-entrant: a garbage collection may end a stack
_here: dict[str, list[tuple[int, Holder]]] = {}  # lock: (process, who has it there)


class DeviceLocks:
    """The locks of some devices, for one start.

    Args:
      holder: For whom they are.
      claims: On which devices; none need no lock.
    """

    def __init__(self, holder: Holder, claims: Iterable[Claim]) -> None:
        self._holder = holder
        # In order, so that two that need the same ones cannot each wait for the other.
        by_lock: dict[str, Claim] = {}
        for claim in claims:
            if claim.lock not in by_lock or not claim.shared:
                by_lock[claim.lock] = claim
        self._claims = [by_lock[lock] for lock in sorted(by_lock)]
        self._files: list[LockFile] = []
        self._given_back = False
        self._lock = threading.Lock()

    @property
    def fds(self) -> tuple[int, ...]:
        """What the shims of the processes on the devices must hold."""
        with self._lock:
            return tuple(file.fd for file in self._files)

    def acquire(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Takes all of them; waits for predecessors that are ending.

        Args:
          timeout_s: How long to wait at most, in seconds; for an owner that lives and does not
            end, at most a minute.
          cancelled: Whether nobody wants them any more.

        Raises:
          DevicesBusyError: Somebody else has one of them.
          StartError: The wait was cancelled, or the locks cannot be made.
        """
        began = time.monotonic()
        try:
            for claim in self._claims:
                path = lock_directory() / f'{claim.lock}.lock'
                self._take(claim, path, began, timeout_s, cancelled)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives them back for good; what shims hold stays held. Twice is no error."""
        with self._lock:
            self._given_back = True
            files, self._files = self._files, []
        for file in files:
            file.close()
        with _here_lock:
            for lock, holders in _here.items():
                _here[lock] = [entry for entry in holders if entry[1] is not self._holder]

    def _take(
        self,
        claim: Claim,
        path: Path,
        began: float,
        timeout_s: float,
        cancelled: Callable[[], bool],
    ) -> None:
        file = LockFile(path)
        with contextlib.ExitStack() as on_error:
            on_error.callback(file.close)
            say_at = began
            while not file.try_lock(shared=claim.shared):
                if cancelled() or self._given_back:
                    raise StartError(f'The start was given up while it waited for {claim.device}.')
                waited_s = time.monotonic() - began
                say_at = self._look_at_holder(claim, path, waited_s, timeout_s, say_at)
                time.sleep(LOOK_INTERVAL_S)
            file.write(what=self._holder.description)
            with self._lock:
                if not self._given_back:
                    self._files.append(file)
                    on_error.pop_all()
        if self._given_back:
            raise StartError(f'The start was given up when it had {claim.device}.')
        with _here_lock:
            _here.setdefault(claim.lock, []).append((os.getpid(), self._holder))

    def _look_at_holder(
        self, claim: Claim, path: Path, waited_s: float, timeout_s: float, say_at: float
    ) -> float:
        """Raises if there is no use in waiting; returns when to speak of the wait again."""
        device, own = claim.device, self._holder.description
        for other in _holders_here(claim.lock):
            if not other.ending:
                raise DevicesBusyError(
                    f'{device} is in use by {other.description} of this process, and {own} needs '
                    f'it. {_MEND} Beam keeps the model of a pipeline that is over until the '
                    'process ends: run the next one in a process of its own.'
                )
        who, alive = owner_of(path)
        patience_s = min(timeout_s, LIVE_OWNER_PATIENCE_S) if alive else timeout_s
        if waited_s > patience_s:
            raise DevicesBusyError(
                f'{device} is still held by {who} after {waited_s:.0f} s, and {own} needs it. '
                f'{_MEND} If it is not of this job, end it.'
            )
        now = time.monotonic()
        if now < say_at:
            return say_at
        _LOGGER.warning('%s is held by %s; %s waits for it to end.', device, who, own)
        return now + SAY_INTERVAL_S


def gpu_claims(
    named: Sequence[str],
    needed: int,
    visible: Sequence[str] | None,
    uuids: Mapping[str, str],
) -> list[Claim]:
    """What an engine needs of GPUs: those it names for itself, else the first visible ones.

    An engine that no device was named for shares them with others of that kind, as its
    gpu-memory-utilization says: Beam's own handlers do so, several models on one GPU.

    Args:
      named: The devices it is pinned to.
      needed: How many it fills.
      visible: The GPUs of this worker; ``None`` where they could not be counted.
      uuids: The UUID of each GPU, by index, as far as they are known. One GPU is one lock,
        whichever of its names is used.
    """
    devices = named
    if not devices:
        devices = (visible if visible is not None else [str(i) for i in range(needed)])[:needed]
    return [
        Claim(_lock_name('gpu', _physical(device, uuids)), f'GPU {device}', shared=not named)
        for device in devices
    ]


def core_claims(named: Sequence[int]) -> list[Claim]:
    """What an engine needs of CPU cores: those that its user named; others can be shared."""
    return [Claim(_lock_name('core', str(core)), f'CPU core {core}') for core in named]


def _physical(device: str, uuids: Mapping[str, str]) -> str:
    """One name for a GPU, whichever it is called by."""
    if device in uuids:
        return uuids[device]
    # CUDA takes the beginning of a UUID for the whole.
    whole = [uuid for uuid in uuids.values() if uuid.startswith(device)]
    return whole[0] if len(whole) == 1 else device


def _lock_name(kind: str, device: str) -> str:
    return f'{kind}-{re.sub("[^A-Za-z0-9-]", "_", device)}'


def _holders_here(lock: str) -> list[Holder]:
    # A fork has a copy of its parent's entries and none of its stacks.
    with _here_lock:
        return [holder for process, holder in _here.get(lock, ()) if process == os.getpid()]
