"""Large language models over Apache Beam pipelines, on vLLM engines behind NVIDIA Dynamo."""

from apache_beam_vllm_dynamo.config import (
    DynamoRuntimeConfig,
    DynamoVLLMEngineSpec,
    EnginesPerWorker,
)
from apache_beam_vllm_dynamo.errors import (
    ChildExitedError,
    ConfigurationError,
    DevicesBusyError,
    ErrorKind,
    InferenceError,
    InferenceFailedError,
    MissingDependencyError,
    RuntimeFailedError,
    StartError,
    StartTimeoutError,
    VLLMDynamoError,
)
from apache_beam_vllm_dynamo.handlers import VLLMChatModelHandler, VLLMCompletionsModelHandler
from apache_beam_vllm_dynamo.inference import LLMInference, SplitErrors
from apache_beam_vllm_dynamo.messages import ChatRequest, CompletionRequest, OpenAIChatMessage
from apache_beam_vllm_dynamo.prefix_batching import PrefixBatchElements

__all__ = [
    'ChatRequest',
    'ChildExitedError',
    'CompletionRequest',
    'ConfigurationError',
    'DevicesBusyError',
    'DynamoRuntimeConfig',
    'DynamoVLLMEngineSpec',
    'EnginesPerWorker',
    'ErrorKind',
    'InferenceError',
    'InferenceFailedError',
    'LLMInference',
    'MissingDependencyError',
    'OpenAIChatMessage',
    'PrefixBatchElements',
    'RuntimeFailedError',
    'SplitErrors',
    'StartError',
    'StartTimeoutError',
    'VLLMChatModelHandler',
    'VLLMCompletionsModelHandler',
    'VLLMDynamoError',
]
