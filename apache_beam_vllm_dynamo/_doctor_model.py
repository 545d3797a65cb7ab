"""Whether the model and its chat template can be read here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apache_beam_vllm_dynamo._doctor_report import Check, gib
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo.config import DynamoVLLMEngineSpec

_CONFIG = 'config.json'
_MISTRAL_CONFIG = 'params.json'  # of models in a format of their own, which vLLM reads
_TOKENIZERS = (
    'tokenizer.json', 'tokenizer.model', 'tekken.json', 'vocab.json', '*.tiktoken', '*.gguf',
)  # fmt: skip
_WEIGHTS = ('*.safetensors', '*.bin', '*.pt', '*.gguf')
_TEMPLATES = ('chat_template.jinja', 'chat_template.json')

_HUB_CACHE = 'hub'

# With these, what is in a directory or in the cache says nothing of what will be served.
_READ_OTHERWISE_FLAGS = frozenset({
    'revision', 'config-format', 'hf-config-path', 'tokenizer', 'tokenizer-mode',
    'tokenizer-revision', 'skip-tokenizer-init', 'use-vllm-tokenizer', 'dyn-chat-processor',
})  # fmt: skip
_READ_OTHERWISE_VARIABLES = (
    'VLLM_USE_MODELSCOPE', 'VLLM_MODEL_REDIRECT_PATH', 'MODEL_EXPRESS_URL',
)  # fmt: skip
# An engine that has one of its own has a cache, or a rule, that the frontend does not have.
_HUB_VARIABLES = ('HF_HOME', 'HF_HUB_', 'HUGGINGFACE_HUB_', 'TRANSFORMERS_')
# Dynamo writes the prompts of these families itself; they come without a chat template.
_WITHOUT_TEMPLATE = ('deepseek', 'kimi')


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """What is on this machine of a model.

    Attributes:
      directory: Where its files are; ``None`` where there are none.
      problem: Why it cannot be served from there; empty where it can.
      weights_bytes: The size of its weights; 0 where there are none.
      has_template: Whether chats can be made into prompts, by its chat template or without.
      may_fetch: Whether the servers fetch what is missing.
      not_looked_at: Why nothing can be said of it here; empty where something can.
    """

    directory: Path | None = None
    problem: str = ''
    weights_bytes: int = 0
    has_template: bool = False
    may_fetch: bool = False
    not_looked_at: str = ''


def look_up_model(subject: Subject, env: Mapping[str, str]) -> ModelFiles:
    """Looks at the directory of that name, or at what Hugging Face's cache holds of it.

    Args:
      subject: What is to run; its model has a name.
      env: The environment of the servers.
    """
    name = subject.model_name
    assert name is not None
    reason = _why_not_looked_at(name, subject, env)
    if reason:
        return ModelFiles(not_looked_at=reason)
    if is_directory_name(name):
        return read_directory(Path(name), native=subject.config is None)
    may_fetch = env.get('HF_HUB_OFFLINE', '0').upper() not in ('1', 'ON', 'YES', 'TRUE')
    snapshot = _snapshot(name, env)
    if snapshot is None:
        return ModelFiles(may_fetch=may_fetch)
    found = read_directory(snapshot, native=subject.config is None)
    return dataclasses.replace(found, may_fetch=may_fetch)


def read_directory(directory: Path, *, native: bool = False) -> ModelFiles:
    """What a model directory holds.

    Args:
      directory: Where it is.
      native: Whether vLLM's own server reads it, which needs less of it than Dynamo.
    """
    if not directory.is_dir():
        return ModelFiles(directory, 'it is no directory of this machine')
    weights = sum(path.stat().st_size for pattern in _WEIGHTS for path in directory.glob(pattern))
    if native and (directory / _MISTRAL_CONFIG).exists():
        return ModelFiles(directory, weights_bytes=weights, has_template=True)
    try:
        config = json.loads((directory / _CONFIG).read_text(encoding='utf-8'))
    except OSError as error:
        return ModelFiles(directory, f'{_CONFIG} cannot be read: {error.strerror}')
    except ValueError as error:
        return ModelFiles(directory, f'{_CONFIG} is no JSON: {error}')
    model_type = config.get('model_type') if isinstance(config, dict) else None
    problem = ''
    if not native and not model_type:
        problem = f'{_CONFIG} names no model_type'
    elif not native and not _holds(directory, _TOKENIZERS):
        problem = 'there is no tokenizer'
    has_template = str(model_type).startswith(_WITHOUT_TEMPLATE) or _has_template(directory)
    return ModelFiles(directory, problem, weights, has_template)


def check_model(subject: Subject, files: ModelFiles, env: Mapping[str, str]) -> Check:
    """Whether the servers can load the model."""
    name, model = 'model', subject.model_name
    if model is None:
        return Check.ok(name, 'none was named; --config names one')
    if files.not_looked_at:
        return Check.ok(name, f'{model}, {files.not_looked_at}; not looked at')
    if files.directory is None and not files.may_fetch:
        return Check.failed(
            name,
            f'{model} is no directory and not in the cache {hub_cache(env)}, and '
            'HF_HUB_OFFLINE forbids to fetch it',
            'Unset HF_HUB_OFFLINE, or put the model into the cache or a directory',
        )
    if files.directory is None or (files.problem and files.may_fetch):
        where = 'is not' if files.directory is None else 'is but in part'
        return Check.warning(
            name,
            f'{model} {where} in the cache {hub_cache(env)}: each worker fetches it, which was not '
            'tried',
            'See that its name is right and, if it is gated, that HF_TOKEN is set on the workers',
        )
    if files.problem:
        return Check.failed(
            name,
            f'{files.directory}: {files.problem}',
            'Give a directory with config.json, tokenizer and weights, or the name of a model on '
            'the hub',
        )
    size = f'{gib(files.weights_bytes)} of weights' if files.weights_bytes else 'no weights'
    return Check.ok(name, f'{files.directory}, {size}')


def check_weights(subject: Subject, files: ModelFiles) -> Check | None:
    """Whether a model directory lacks its weights; ``None`` where there is nothing to say."""
    whole = files.directory is None or files.problem or files.weights_bytes or files.may_fetch
    if whole or subject.server == 'simulated' or any(map(_loads_otherwise, _kwargs(subject))):
        return None
    return Check.failed(
        'weights',
        f'{files.directory} has none',
        "Put them there; engine_kind='simulated' or a load-format of their own do without",
    )


def check_template(subject: Subject, files: ModelFiles) -> Check:
    """Whether chats can be made into prompts.

    Dynamo serves no model where they cannot. Real engines that are asked prompts alone get one
    that nothing uses, see ``template_for_prompts``; simulated ones take none.
    """
    name, path = 'chat template', subject.chat_template_path
    simulated = subject.server == 'simulated'
    if path is not None and not simulated:
        return _check_file(path)
    if files.directory is None or files.problem:
        return Check.ok(name, 'that of the model, which was not looked at')
    if files.has_template:
        return Check.ok(name, 'that of the model')
    if subject.asks == 'prompts' and not simulated:
        return Check.ok(name, 'none, and prompts need none')
    mend = 'Put a chat_template.jinja there, or give chat_template_path to the chat handler'
    if files.may_fetch:
        found = (
            f'the cache holds none of {subject.model_name}; whether the hub has one is not known'
        )
        return Check.warning(name, found, 'If not, give chat_template_path to the chat handler')
    found = f'{files.directory} has none'
    if subject.server == 'native' or (subject.asks is None and not simulated):
        return Check.warning(name, f'{found}: prompts work, chats do not', mend)
    also = ', not even for prompts on simulated engines' if simulated else ''
    return Check.failed(name, f'{found}, and Dynamo serves no model without one{also}', mend)


def _why_not_looked_at(name: str, subject: Subject, env: Mapping[str, str]) -> str:
    """Why what lies here says nothing of what will be served; empty where it does."""
    if is_remote(name):
        return 'which is read by vLLM'
    if Path(name).is_file():
        return 'a file, which is read by vLLM'
    flags = {flag for kwargs in _all_kwargs(subject) for flag in kwargs} & _READ_OTHERWISE_FLAGS
    variables = {variable for variable in _READ_OTHERWISE_VARIABLES if env.get(variable)}
    of_engines = {variable for spec in _specs(subject) for variable in spec.env}
    variables |= of_engines & set(_READ_OTHERWISE_VARIABLES)
    if not is_directory_name(name):
        variables |= {variable for variable in of_engines if variable.startswith(_HUB_VARIABLES)}
    how = sorted(flags) + sorted(variables)
    return f'which is read as {", ".join(how)} says' if how else ''


def is_remote(name: str) -> bool:
    """Whether a name is an address, ``gs://…`` for example."""
    return '://' in name


def is_directory_name(name: str) -> bool:
    """Whether a model's name is a directory's, and not one on the hub."""
    return name.startswith(('/', './', '../', '~')) or Path(name).exists()


def hub_cache(env: Mapping[str, str]) -> Path:
    """Where Hugging Face's libraries keep what they fetched."""
    for variable in ('HF_HUB_CACHE', 'HUGGINGFACE_HUB_CACHE'):
        if env.get(variable):
            return Path(env[variable])
    if env.get('HF_HOME'):
        return Path(env['HF_HOME']) / _HUB_CACHE
    home = Path(env.get('HOME') or '~').expanduser()
    return Path(env.get('XDG_CACHE_HOME') or home / '.cache') / 'huggingface' / _HUB_CACHE


def _specs(subject: Subject) -> Sequence[DynamoVLLMEngineSpec]:
    """The engines behind Dynamo; none where vLLM's own server serves."""
    if subject.config is None:
        return ()
    engines = subject.config.engines
    return engines if isinstance(engines, tuple) else (engines.spec,)


def _kwargs(subject: Subject) -> Sequence[Mapping[str, object]]:
    """The flags of each engine, or of vLLM's own server."""
    if subject.config is None:
        return (subject.native_kwargs,)
    return [spec.vllm_server_kwargs for spec in _specs(subject)]


def _all_kwargs(subject: Subject) -> Sequence[Mapping[str, object]]:
    """The flags of all servers."""
    frontend = [] if subject.config is None else [subject.config.frontend_kwargs]
    return [*_kwargs(subject), *frontend]


def _loads_otherwise(kwargs: Mapping[str, object]) -> bool:
    """Whether vLLM is told where weights come from: from a stream, or from nowhere."""
    return kwargs.get('load-format', 'auto') != 'auto'


def _snapshot(model_name: str, env: Mapping[str, str]) -> Path | None:
    repository = hub_cache(env) / f'models--{model_name.replace("/", "--")}'
    try:
        revision = (repository / 'refs' / 'main').read_text().strip()
    except OSError:
        return None
    snapshot = repository / 'snapshots' / revision
    return snapshot if snapshot.is_dir() else None


def _holds(directory: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(directory.glob(pattern)) for pattern in patterns)


def _has_template(directory: Path) -> bool:
    if _holds(directory, _TEMPLATES):
        return True
    try:
        settings: Any = json.loads((directory / 'tokenizer_config.json').read_text('utf-8'))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get('chat_template'))


def _check_file(path: str) -> Check:
    name = 'chat template'
    if is_remote(path):
        return Check.ok(name, f'{path}, which the workers read; not looked at')
    try:
        text = Path(path).read_text(encoding='utf-8')
    except (OSError, ValueError) as error:
        return Check.failed(
            name,
            f'{path} cannot be read: {error}',
            'Give a text file at a path that the workers can open, gs://… for example',
        )
    if '{' not in text:
        return Check.warning(
            name, f'{path} holds nothing of a Jinja template', 'See that it is the right file'
        )
    return Check.ok(name, path)
