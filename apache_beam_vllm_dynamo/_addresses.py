"""Every port, socket and directory of one start, chosen in one call.

Ports are taken below the ephemeral range: a listening port inside it is lost to an
outgoing connection now and then. Dynamo also reads an engine's system port as a signed
16-bit number, so no port is above 32767.

A port found free can be taken by someone else before its child binds it; the runtime then
starts again with other addresses.
"""

from __future__ import annotations

import dataclasses
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from apache_beam_vllm_dynamo.errors import StartError

LOOPBACK = '127.0.0.1'
LOWEST_PORT = 10_000  # below it live the well-known services
HIGHEST_PORT = 32_767  # DYN_SYSTEM_PORT is read as a signed 16-bit number
LONGEST_SOCKET_PATH_BYTES = 100  # sun_path holds 108, and ZeroMQ adds to some names

_EPHEMERAL_RANGE = Path('/proc/sys/net/ipv4/ip_local_port_range')


@dataclasses.dataclass(frozen=True)
class EngineAddresses:
    """What one engine listens on.

    Attributes:
      system_port: Its health and metrics, over HTTP.
      side_channel_port: vLLM's connector side channel, for engines that are given one.
      kv_events: The ZeroMQ endpoint on which vLLM publishes KV events to its own process.
    """

    system_port: int
    side_channel_port: int
    kv_events: str


@dataclasses.dataclass(frozen=True)
class Addresses:
    """What the processes of one start listen on, all inside this machine.

    Attributes:
      directory: The private directory of the start.
      frontend_port: The OpenAI-compatible HTTP server.
      etcd_client_port: etcd, for its clients.
      etcd_peer_port: etcd, for the peers that it does not have.
      broker_in: Where processes publish to the event broker.
      broker_out: Where processes subscribe to it.
      engines: One entry an engine.
    """

    directory: Path
    frontend_port: int
    etcd_client_port: int
    etcd_peer_port: int
    broker_in: str
    broker_out: str
    engines: tuple[EngineAddresses, ...]

    @property
    def base_url(self) -> str:
        """Where requests go."""
        return f'http://{LOOPBACK}:{self.frontend_port}'

    @property
    def etcd_endpoint(self) -> str:
        """The etcd of this start."""
        return f'http://{LOOPBACK}:{self.etcd_client_port}'

    @property
    def etcd_directory(self) -> Path:
        """Where the etcd of this start keeps its data."""
        return self.directory / 'etcd'

    @property
    def discovery_directory(self) -> Path:
        """Where engines and frontend find each other without etcd."""
        return self.directory / 'discovery'


def move_frontend(addresses: Addresses) -> Addresses:
    """The same with another port for the frontend."""
    return dataclasses.replace(addresses, frontend_port=free_ports(1)[0])


def move_etcd(addresses: Addresses) -> Addresses:
    """The same with other ports for etcd."""
    client, peer = free_ports(2)
    return dataclasses.replace(addresses, etcd_client_port=client, etcd_peer_port=peer)


def move_engine(addresses: Addresses, index: int) -> Addresses:
    """The same with other ports for one engine, counted from 0."""
    engines = list(addresses.engines)
    system, side_channel = free_ports(2)
    engines[index] = dataclasses.replace(
        engines[index], system_port=system, side_channel_port=side_channel
    )
    return dataclasses.replace(addresses, engines=tuple(engines))


def allocate(
    directory: Path,
    num_engines: int,
    *,
    ports: Callable[[int], list[int]] | None = None,
) -> Addresses:
    """Chooses all addresses of one start.

    Args:
      directory: The private directory of the start; sockets are made in it.
      num_engines: How many engines there will be.
      ports: Gives that many different free ports; for tests.

    Raises:
      StartError: No ports are free, or ``directory`` is too long for a Unix socket.
    """
    free = iter((ports or free_ports)(3 + 2 * num_engines))
    frontend, etcd_client, etcd_peer = next(free), next(free), next(free)
    return Addresses(
        directory=directory,
        frontend_port=frontend,
        etcd_client_port=etcd_client,
        etcd_peer_port=etcd_peer,
        broker_in=_socket(directory, 'events-in'),
        broker_out=_socket(directory, 'events-out'),
        engines=tuple(
            EngineAddresses(
                system_port=next(free),
                side_channel_port=next(free),
                # vLLM makes an endpoint of its own for each data-parallel rank of an engine,
                # but only of names with "inproc" or "tcp" in them.
                kv_events=_socket(directory, f'kv{index}inproc'),
            )
            for index in range(num_engines)
        ),
    )


def free_ports(count: int) -> list[int]:
    """Finds ``count`` different loopback ports that nobody listens on just now.

    Raises:
      StartError: There are not that many.
    """
    candidates = _candidates(LOWEST_PORT, min(HIGHEST_PORT, _ephemeral_floor() - 1))
    found: list[int] = []
    # Each stays bound until all are found, so that a start at the same moment finds others.
    held: list[socket.socket] = []
    try:
        for port in candidates:
            if len(found) == count:
                break
            listener = _bind(port)
            if listener is not None:
                held.append(listener)
                found.append(port)
    finally:
        for listener in held:
            listener.close()
    if len(found) < count:
        raise StartError(
            f'Only {len(found)} of {count} ports between {LOWEST_PORT} and {HIGHEST_PORT} are '
            'free on this machine; end what listens there, or start fewer engines.'
        )
    return found


def _candidates(lowest: int, highest: int) -> Iterator[int]:
    # A random start keeps runtimes that start at the same moment apart.
    numbers: Iterable[int] = range(lowest, highest + 1)
    return iter(random.sample(list(numbers), highest + 1 - lowest))


def _ephemeral_floor() -> int:
    try:
        floor = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return HIGHEST_PORT + 1
    # A range lowered below our own leaves no room under it; then any port has to do.
    return floor if floor > LOWEST_PORT + 1_000 else HIGHEST_PORT + 1


def _bind(port: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # No SO_REUSEADDR: a port in any use is passed over.
        listener.bind(('0.0.0.0', port))  # noqa: S104 - bound for a moment, never listened on
    except OSError:
        listener.close()
        return None
    return listener


def _socket(directory: Path, name: str) -> str:
    path = os.fspath(directory / name)
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH_BYTES:
        raise StartError(
            f'{path} is too long for a Unix socket ({LONGEST_SOCKET_PATH_BYTES} bytes at most); '
            'set TMPDIR to a shorter path on the worker.'
        )
    return f'ipc://{path}'
