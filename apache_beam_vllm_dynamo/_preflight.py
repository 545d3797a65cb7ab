"""The part of the doctor that takes milliseconds: what is looked at before each start."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from apache_beam_vllm_dynamo._doctor_machine import check_disk
from apache_beam_vllm_dynamo._doctor_model import check_model, check_template, look_up_model
from apache_beam_vllm_dynamo._doctor_report import Result
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo.config import DynamoRuntimeConfig
from apache_beam_vllm_dynamo.errors import StartError


def preflight(
    model_name: str,
    config: DynamoRuntimeConfig,
    *,
    chat_template: str | None,
    env: Mapping[str, str],
) -> None:
    """Finds what would only show after a model load, or as a start that never gets ready.

    Args:
      model_name: The model.
      config: The engines and the router.
      chat_template: The text of a chat template over the model's own, or ``None``.
      env: The environment of the servers.

    Raises:
      StartError: The model cannot be served from this machine; the text says what to do.
    """
    subject = Subject(given=True, model_name=model_name, config=config)
    files = look_up_model(model_name, env)
    directory = Path(tempfile.gettempdir())
    checks = [
        check_disk(directory, shutil.disk_usage(directory).free),
        check_model(subject, files, env),
    ]
    # Simulated engines are not given the template.
    if chat_template is None or config.engine_kind == 'simulated':
        checks.append(check_template(subject, files))
    for check in checks:
        if check.result is Result.FAILED:
            raise StartError(f'{check.name}: {check.found}. {check.mend}.')
