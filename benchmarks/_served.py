"""One running frontend, as the model of every driver that is compared.

Each driver gets what its own handler would have loaded, but pointed at a server that runs
already, so that all of them ask the same one.
"""

from __future__ import annotations

from typing import Any

from apache_beam.ml.inference import vllm_inference as upstream

from apache_beam_vllm_dynamo import VLLMCompletionsModelHandler


class Served:
    """A running server, with the faces of both handlers' models.

    Args:
      base_url: Where it listens, without a path.
      window: How many requests its engines run at once.
    """

    def __init__(self, base_url: str, window: int) -> None:
        self._base_url = base_url
        self._window = window

    # What our handlers ask.

    def server_id(self) -> str:
        return self._base_url

    def window(self) -> int:
        return self._window

    def kv_caches(self) -> int:
        return 1

    def endpoint(self) -> str:
        return self._base_url

    def take_events(self) -> tuple[int, int]:
        return 0, 0

    # What Beam's handlers ask.

    def get_server_port(self) -> int:
        return int(self._base_url.rsplit(':', 1)[1])

    def check_connectivity(self) -> None:
        pass


class OursOnServed(VLLMCompletionsModelHandler):
    """Our handler, on a server that runs."""

    def __init__(self, model_name: str, served: Served, **arguments: Any) -> None:
        super().__init__(model_name, use_dynamo=True, **arguments)
        self._served = served

    def load_model(self) -> Any:
        return self._served


class BeamsOnServed(upstream.VLLMCompletionsModelHandler):
    """Beam's handler, on a server that runs."""

    def __init__(self, model_name: str, served: Served, batch_size: int) -> None:
        super().__init__(model_name, min_batch_size=batch_size, max_batch_size=batch_size)
        self._served = served

    def load_model(self) -> Any:
        return self._served
