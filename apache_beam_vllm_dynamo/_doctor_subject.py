"""What is to run on this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from apache_beam_vllm_dynamo._arguments import ServerArgument
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig, EnginesPerWorker

Server = Literal['gpu', 'cpu', 'simulated', 'native']
"""What serves: an engine kind of Dynamo's, or vLLM's own server."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is to run, as far as it is known.

    Attributes:
      given: Whether a file described it.
      model_name: The model, or ``None`` where it is not known.
      config: The engines and the router; ``None`` for vLLM's own server.
      native_kwargs: The flags of vLLM's own server.
      asks: What the model is asked; ``None`` where it is not known.
      chat_template_path: A chat template over the model's own, or ``None``.
      env_vars: Environment variables of the servers.
    """

    given: bool = False
    model_name: str | None = None
    config: DynamoRuntimeConfig | None = dataclasses.field(
        default_factory=lambda: DynamoRuntimeConfig(engines=EnginesPerWorker())
    )
    native_kwargs: Mapping[str, ServerArgument] = dataclasses.field(default_factory=dict)
    asks: Literal['prompts', 'chats'] | None = None
    chat_template_path: str | None = None
    env_vars: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def server(self) -> Server:
        """What serves."""
        return 'native' if self.config is None else self.config.engine_kind

    @property
    def needs_gpus(self) -> bool:
        """Whether it is said to run on GPUs; vLLM's own server finds its device by itself."""
        return self.given and self.server == 'gpu'

    def starts_etcd(self, env: Mapping[str, str]) -> bool:
        """Whether an etcd is started beside the engines; ``env`` is that of the servers."""
        external = env.get('ETCD_ENDPOINTS', '').strip()
        return self.config is not None and self.config.discovery == 'etcd' and not external
