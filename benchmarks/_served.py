"""One running frontend, as the model of every driver that is compared.

Each driver gets what its own handler would have loaded, but pointed at a server that runs
already, so that all of them ask the same one.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from apache_beam.ml.inference import vllm_inference as upstream

from apache_beam_vllm_dynamo import DynamoRuntimeConfig, VLLMCompletionsModelHandler, _clients
from apache_beam_vllm_dynamo._dynamo_runtime import _DynamoLocalRuntime


class Served:
    """A running server, with the faces of both handlers' models.

    Args:
      base_url: Where it listens, without a path.
      window: How many requests its engines run at once.
      kv_caches: How many engines it has.
      others: Further servers of the same kind, where each SDK process is to have its own.
      claims: A directory in which the processes say which one they took.
    """

    def __init__(
        self,
        base_url: str,
        window: int,
        *,
        kv_caches: int = 1,
        others: Sequence[str] = (),
        claims: pathlib.Path | None = None,
    ) -> None:
        self._base_url = base_url
        self._window = window
        self._kv_caches = kv_caches
        self._others = tuple(others)
        self._claims = claims

    @property
    def is_shared(self) -> bool:
        """Whether all processes ask one server."""
        return not self._others

    def claimed(self) -> Served:
        """The server that is this process's own."""
        if self._claims is None or self.is_shared:
            return self
        for number, url in enumerate((self._base_url, *self._others)):
            claim = self._claims / f'claim-{number}'
            with contextlib.suppress(FileExistsError):
                claim.touch(exist_ok=False)
                claim.write_text(str(os.getpid()))
            if claim.read_text() == str(os.getpid()):
                return Served(url, self._window, kv_caches=self._kv_caches)
        raise RuntimeError('There are more processes than servers.')

    # What our handlers ask.

    def server_id(self) -> str:
        return self._base_url

    def window(self) -> int:
        return self._window

    def kv_caches(self) -> int:
        return self._kv_caches

    def endpoint(self) -> str:
        return self._base_url

    def take_events(self) -> dict[str, int]:
        return {}

    # What Beam's handlers ask.

    def get_server_port(self) -> int:
        return int(self._base_url.rsplit(':', 1)[1])

    def check_connectivity(self) -> None:
        pass


@contextlib.contextmanager
def serving(model_name: str, config: DynamoRuntimeConfig) -> Iterator[_DynamoLocalRuntime]:
    """A stack of its own for a measurement; afterwards no client of this process is left either."""
    runtime = _DynamoLocalRuntime(model_name, config)
    runtime.start()
    try:
        yield runtime
    finally:
        _clients.close_all()
        runtime.close('the measurement is over')


class OursOnServed(VLLMCompletionsModelHandler):
    """Our handler, on a server that runs."""

    def __init__(self, model_name: str, served: Served, **arguments: Any) -> None:
        super().__init__(model_name, use_dynamo=True, **arguments)
        self._served = served

    def load_model(self) -> Any:
        return self._served.claimed()

    def share_model_across_processes(self) -> bool:
        return self._served.is_shared


class BeamsOnServed(upstream.VLLMCompletionsModelHandler):
    """Beam's handler, on a server that runs."""

    def __init__(self, model_name: str, served: Served, batch_size: int) -> None:
        super().__init__(model_name, min_batch_size=batch_size, max_batch_size=batch_size)
        self._served = served

    def load_model(self) -> Any:
        return self._served.claimed()

    def share_model_across_processes(self) -> bool:
        return self._served.is_shared
