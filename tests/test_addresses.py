"""The addresses of a start: different, free, low, and short enough."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from apache_beam_vllm_dynamo import _addresses
from apache_beam_vllm_dynamo._addresses import (
    HIGHEST_PORT,
    LONGEST_SOCKET_PATH_BYTES,
    LOWEST_PORT,
    Addresses,
    allocate,
    free_ports,
)
from apache_beam_vllm_dynamo.errors import StartError

DIRECTORY = Path('/tmp/beam-dynamo-abcdefgh')


def ipv6_works() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as server:
            server.bind(('::', 0))
    except OSError:
        return False
    return True


HOSTS = [
    ('127.0.0.1', socket.AF_INET),
    ('0.0.0.0', socket.AF_INET),
    ('127.0.0.2', socket.AF_INET),
    # A machine without IPv6 has no such listener that could be met.
    *([('::', socket.AF_INET6)] if ipv6_works() else []),
]


def ports_of(addresses: Addresses) -> list[int]:
    engines = [(e.system_port, e.side_channel_port) for e in addresses.engines]
    own = [addresses.frontend_port, addresses.etcd_client_port, addresses.etcd_peer_port]
    return own + [port for pair in engines for port in pair]


def sockets_of(addresses: Addresses) -> list[str]:
    return [addresses.broker_in, addresses.broker_out, *(e.kv_events for e in addresses.engines)]


@contextlib.contextmanager
def listening(host: str, family: socket.AddressFamily = socket.AF_INET) -> Iterator[int]:
    """Listens on a port of the range of which ports are chosen."""
    for port in free_ports(20):
        server = socket.socket(family, socket.SOCK_STREAM)
        with server, contextlib.suppress(OSError):
            server.bind((host, port))
            server.listen()
            yield port
            return
    pytest.fail('no port could be listened on')


@pytest.mark.parametrize('engines', range(1, 17))
def test_every_port_and_socket_of_a_start_is_its_own(engines: int) -> None:
    addresses = allocate(DIRECTORY, engines)
    ports, sockets = ports_of(addresses), sockets_of(addresses)
    assert len(addresses.engines) == engines
    assert len(set(ports)) == len(ports) == 3 + 2 * engines
    assert len(set(sockets)) == len(sockets) == 2 + engines
    ephemeral = int(Path('/proc/sys/net/ipv4/ip_local_port_range').read_text().split()[0])
    assert max(ports) <= HIGHEST_PORT == 32_767
    assert ephemeral <= LOWEST_PORT + 1_000 or max(ports) < ephemeral
    assert min(ports) >= LOWEST_PORT


@pytest.mark.parametrize('engines', [1, 16])
def test_sockets_lie_in_the_directory_and_are_short_enough(engines: int) -> None:
    for endpoint in sockets_of(allocate(DIRECTORY, engines)):
        path = endpoint.removeprefix('ipc://')
        assert path != endpoint
        assert Path(path).parent == DIRECTORY
        assert len(path.encode()) <= LONGEST_SOCKET_PATH_BYTES


def test_urls_and_directories_follow_from_the_ports_and_the_directory() -> None:
    addresses = allocate(DIRECTORY, 1, ports=lambda count: list(range(20_000, 20_000 + count)))
    assert addresses.base_url == 'http://127.0.0.1:20000'
    assert addresses.etcd_endpoint == 'http://127.0.0.1:20001'
    assert addresses.etcd_directory == DIRECTORY / 'etcd'
    assert addresses.discovery_directory == DIRECTORY / 'discovery'


@pytest.mark.parametrize(
    ('name', 'fits'),
    [('d' * 84, True), ('d' * 85, False), ('é' * 42, True), ('é' * 43, False)],
    ids=['100 bytes', '101 bytes', '100 bytes of 58 letters', '102 bytes of 59 letters'],
)
def test_a_directory_too_long_for_a_socket_is_refused_before_anything_starts(
    name: str, *, fits: bool
) -> None:
    """The limit is in bytes; the longest name in the directory is of ten, after a slash."""
    directory = Path('/xxx') / name
    if fits:
        allocate(directory, 1)
        return
    with pytest.raises(StartError, match=r'too long for a Unix socket .* set TMPDIR'):
        allocate(directory, 1)


@pytest.mark.parametrize(('host', 'family'), HOSTS)
def test_a_port_in_use_on_any_address_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, host: str, family: socket.AddressFamily
) -> None:
    with listening(host, family) as taken:
        others = [port for port in free_ports(3) if port != taken]
        monkeypatch.setattr(_addresses, '_candidates', lambda *_: iter([taken, *others]))
        assert free_ports(2) == others[:2]


def test_ports_are_free_again_once_they_are_chosen() -> None:
    for port in free_ports(5):
        with socket.socket() as server:
            server.bind(('127.0.0.1', port))


def test_a_port_once_found_is_held_until_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start at the same moment cannot find it too."""
    first, second = free_ports(2)

    def candidates(*_: int) -> Iterator[int]:
        yield first
        with pytest.raises(OSError, match='in use'), socket.socket() as other:
            other.bind(('127.0.0.1', first))
        yield second

    monkeypatch.setattr(_addresses, '_candidates', candidates)
    assert free_ports(2) == [first, second]


def test_too_few_free_ports_are_an_error_that_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening('127.0.0.1') as taken:
        free = next(port for port in free_ports(2) if port != taken)
        monkeypatch.setattr(_addresses, '_candidates', lambda *_: iter([taken, free]))
        with pytest.raises(StartError, match='Only 1 of 2 ports between 10000 and 32767 are free'):
            free_ports(2)


def test_starts_at_the_same_moment_all_succeed_and_rarely_meet() -> None:
    """Sixteen threads take ports at once; a chance meeting of a few is left to the retry."""
    threads = 16
    barrier = threading.Barrier(threads)

    def choose(_: int) -> list[int]:
        barrier.wait(timeout=30)
        return ports_of(allocate(DIRECTORY, 2))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        chosen = list(pool.map(choose, range(threads)))
    assert all(len(set(ports)) == 7 for ports in chosen)
    met = sum(count - 1 for count in Counter(port for ports in chosen for port in ports).values())
    # 112 ports of more than 20,000: about 0.3 meetings are expected, ten are one in 10^12.
    assert met < 10


@pytest.mark.parametrize(
    ('text', 'highest'),
    [
        ('32768\t60999\n', 32_767),
        ('16000 65000\n', 15_999),
        ('1024 65535\n', 32_767),
        ('', 32_767),
        ('nonsense\n', 32_767),
        (None, 32_767),
    ],
    ids=['usual', 'low', 'everything', 'empty', 'unreadable', 'absent'],
)
def test_ports_stay_below_the_ephemeral_range_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, highest: int
) -> None:
    file = tmp_path / 'ip_local_port_range'
    if text is not None:
        file.write_text(text)
    asked: list[tuple[int, int]] = []

    def candidates(low: int, high: int) -> Iterator[int]:
        asked.append((low, high))
        return iter(())

    monkeypatch.setattr(_addresses, '_EPHEMERAL_RANGE', file)
    monkeypatch.setattr(_addresses, '_candidates', candidates)
    assert free_ports(0) == []
    assert asked == [(LOWEST_PORT, highest)]
