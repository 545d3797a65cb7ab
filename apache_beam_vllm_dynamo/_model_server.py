"""The model of Beam's contract: a running server, native or behind Dynamo, with one face.

Several of these objects, in one process or many, may stand for one server (``_sharing.py``).
Where Beam itself puts one behind a ``MultiProcessShared`` proxy, as it does with the models of a
``KeyedModelHandler`` that has several, only its public methods can be called, with values that
pickle.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable

from apache_beam_vllm_dynamo._restart import ChildStatus
from apache_beam_vllm_dynamo._runtime import Runtime
from apache_beam_vllm_dynamo._sharing import Place
from apache_beam_vllm_dynamo.errors import RuntimeFailedError

_running: weakref.WeakSet[_VLLMModelServer] = weakref.WeakSet()
_kept: dict[str, _VLLMModelServer] = {}  # by identity


def keep(server: _VLLMModelServer) -> _VLLMModelServer:
    """Keeps a server until this process ends or closes it, and returns it.

    A runner drops the stages that have had no work for a minute, and with them their models; the
    next element would wait for minutes until the model is loaded again.
    """
    kept = _kept.get(server.identity)
    if kept is None or not kept.is_open:  # one is enough, however often it is loaded
        _kept[server.identity] = server
    return server


def _keep_no_longer(server: _VLLMModelServer) -> None:
    if _kept.get(server.identity) is server:
        del _kept[server.identity]


def close_all() -> None:
    """Closes every model server of this process, those that are kept too."""
    for server in tuple(_running):
        server.close()


class _VLLMModelServer:
    """A server that has started.

    It ends when all objects that stand for it are closed, or dropped where the process does not
    keep them (``keep``), in whichever process they are, and, through the lifelines of its
    processes, when the process that runs it is killed; where others still use it then, one of
    them starts it again.

    Args:
      make: Makes what runs it, not started.

    Raises:
      StartError: It did not come up.
    """

    def __init__(self, make: Callable[[], Runtime]) -> None:
        self._id = uuid.uuid4().hex
        self._place = Place(make)
        self._finalizer = weakref.finalize(self, self._place.leave)
        self.identity = self._place.identity
        _running.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it still stands for the server."""
        return self._finalizer.alive

    def server_id(self) -> str:
        """A name that tells this load from every other."""
        return self._id

    def window(self) -> int:
        """How many requests the server can work on at once."""
        return self._place.window

    def kv_caches(self) -> int:
        """How many KV caches the server has: one for each engine, or rank of one."""
        return self._place.kv_caches

    def endpoint(self) -> str:
        """Where requests go, without a path.

        When the process that ran the server has ended, the server is started again first.

        Raises:
          RuntimeFailedError: The server is gone for good.
          StartError: It did not come up again.
        """
        try:
            return self._place.endpoint()
        except RuntimeFailedError:
            _keep_no_longer(self)  # whoever loads it after that starts it anew
            raise

    def status(self) -> tuple[ChildStatus, ...]:
        """The state, process id, devices, restarts and last error of each process."""
        return self._place.statuses()

    def take_events(self) -> dict[str, int]:
        """What happened since anybody asked last, by the name of a metric, each once.

        The servers' own counts are read at most once a second; what they counted in between
        comes with the next answer.
        """
        return self._place.take_events()

    def close(self) -> None:
        """Gives the server up, and ends it if nobody else uses it; twice is no error."""
        _keep_no_longer(self)
        self._finalizer()
