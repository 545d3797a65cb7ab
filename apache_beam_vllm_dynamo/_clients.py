"""The clients of this process: one a server, whichever handler copies and threads use it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from apache_beam_vllm_dynamo._client import InferenceClient

# A client lives as long as a handler of this process that has used it.
_clients: weakref.WeakValueDictionary[str, InferenceClient] = weakref.WeakValueDictionary()
# By process: in a fork, the lock of its parent may be held by a thread that the fork does not have.
_locks: dict[int, threading.Lock] = {}


def client_for(server_id: str, make: Callable[[], InferenceClient]) -> InferenceClient:
    """The client of a server, made by ``make`` where this process has none yet."""
    with _lock():
        client = _clients.get(server_id)
        if client is None:
            client = _clients[server_id] = make()
        return client


def close_all() -> None:
    """Closes every client of this process, and with the last one their loop."""
    with _lock():
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.close()


def _lock() -> threading.Lock:
    return _locks.setdefault(os.getpid(), threading.Lock())
