"""The clients of this process: one a server, whichever handler copies and threads use it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol

from apache_beam_vllm_dynamo._client import InferenceClient
from apache_beam_vllm_dynamo.errors import RuntimeFailedError


class Model(Protocol):
    """What knows where a server is: a model, or Beam's proxy of one."""

    def endpoint(self) -> str:
        """Where requests go, without a path."""


class Address:
    """Where a server is, by the models that are in use at the moment.

    Beam may bring another proxy of the model with each call, and releases it after that; and it
    ends a model by dropping it. So none is kept, or asked, beyond the call that brought it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: list[Model] = []

    @contextlib.contextmanager
    def through(self, model: Model) -> Iterator[None]:
        """Asks ``model`` while the block lasts."""
        with self._lock:
            self._models.append(model)
        try:
            yield
        finally:
            with self._lock:
                self._models = _without_one(self._models, model)

    def __call__(self) -> str:
        """Where requests go, without a path.

        Raises:
          RuntimeFailedError: No model is in use.
          Exception: What the model raised.
        """
        while True:
            model = self._latest()
            if model is None:
                raise RuntimeFailedError('The server was closed.')
            try:
                return model.endpoint()
            except Exception:
                # One that its caller has let go meanwhile speaks for nobody else.
                if self._has(model) or self._latest() is None:
                    raise

    def _latest(self) -> Model | None:
        with self._lock:
            return self._models[-1] if self._models else None

    def _has(self, model: Model) -> bool:
        with self._lock:
            return any(other is model for other in self._models)


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class ServerClient:
    """A client, and the address that it looks its server up by."""

    client: InferenceClient
    address: Address


# A client lives as long as a handler of this process that has used it.
_clients: weakref.WeakValueDictionary[str, ServerClient] = weakref.WeakValueDictionary()
# By process: in a fork, the lock of its parent may be held by a thread that the fork does not have.
_locks: dict[int, threading.Lock] = {}


def client_for(server_id: str, make: Callable[[Address], InferenceClient]) -> ServerClient:
    """The client of a server, made by ``make`` where this process has none yet."""
    with _lock():
        client = _clients.get(server_id)
        if client is None:
            address = Address()
            client = _clients[server_id] = ServerClient(make(address), address)
        return client


def close_all() -> None:
    """Closes every client of this process, and with the last one their loop."""
    with _lock():
        clients = list(_clients.values())
        _clients.clear()
    for client in clients:
        client.client.close()


def _without_one(models: list[Model], model: Model) -> list[Model]:
    # By identity: a proxy would send a comparison to the other process.
    last = max(index for index, other in enumerate(models) if other is model)
    return models[:last] + models[last + 1 :]


def _lock() -> threading.Lock:
    return _locks.setdefault(os.getpid(), threading.Lock())
