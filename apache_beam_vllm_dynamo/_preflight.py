"""The part of the doctor that takes milliseconds: what is looked at before each start."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from apache_beam_vllm_dynamo._doctor_machine import check_disk
from apache_beam_vllm_dynamo._doctor_model import check_model, check_template, look_up_model
from apache_beam_vllm_dynamo._doctor_report import Result
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import StartError

# Dynamo wants one of every model, and makes no use of it for prompts.
UNUSED_TEMPLATE = '{% for message in messages %}{{ message.content }}{% endfor %}'


def template_for_prompts(
    model_name: str, config: DynamoRuntimeConfig, env: Mapping[str, str]
) -> str | None:
    """The template that the servers of a model need in order to be asked prompts alone.

    ``None`` where the model has its own, so that who asks it chats can share the servers, and
    where that is not known here. Simulated engines take none.
    """
    subject = Subject(given=True, model_name=model_name, config=config, asks='prompts')
    files = look_up_model(subject, env)
    known = files.directory is not None and (files.directory / 'tokenizer_config.json').exists()
    if subject.server == 'simulated' or not known or files.has_template:
        return None
    return UNUSED_TEMPLATE


def preflight(
    subject: Subject,
    directory: Path,
    *,
    chat_template: str | None,
    env: Mapping[str, str],
) -> None:
    """Finds what would only show after a model load, or as a start that never gets ready.

    What cannot be told for sure from this machine, such as whether a model of the hub can be
    fetched, is left to the servers.

    Args:
      subject: What is to start; its model has a name.
      directory: The private directory of the start.
      chat_template: The text of a chat template over the model's own, or ``None``.
      env: The environment of the servers.

    Raises:
      StartError: It cannot be served from this machine; the text says what to do.
    """
    files = look_up_model(subject, env)
    checks = [check_model(subject, files, env)]
    # Simulated engines are not given the template.
    if chat_template is None or subject.server == 'simulated':
        checks.append(check_template(subject, files))
    if subject.starts_etcd(env):
        # Of all that is started it alone asks for much at once.
        checks.append(check_disk(directory, shutil.disk_usage(directory).free))
    for check in checks:
        if check.result is Result.FAILED:
            raise StartError(f'{check.name}: {check.found}. {check.mend}.')
