"""What is missing on this machine, and how to get it.

    python -m apache_beam_vllm_dynamo.doctor --config handler.yaml

It looks at the packages and whether they fit together, at the flags that the installed servers
take, at etcd, GPUs, memory and disk, at what dead runs have left, and at the model. The file
holds the arguments of a handler by name, nested as in Python; without one it looks at what any
config needs. Nothing is changed. The exit status is 1 where a check failed, 2 where it was called
wrongly.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence

from apache_beam_vllm_dynamo._doctor_file import (
    UnreadableFileError,
    read_mapping,
    subject_from_mapping,
)
from apache_beam_vllm_dynamo._doctor_flags import ask_for_help, check_flags, needed_flags
from apache_beam_vllm_dynamo._doctor_gpus import (
    check_driver,
    check_dtype,
    check_gpus,
    check_memory,
    check_placement,
    is_visible,
    look_up_gpus,
)
from apache_beam_vllm_dynamo._doctor_machine import check_etcd, check_this_machine
from apache_beam_vllm_dynamo._doctor_model import (
    check_model,
    check_template,
    check_weights,
    look_up_model,
)
from apache_beam_vllm_dynamo._doctor_packages import (
    Packages,
    check_packages,
    cuda_major,
    look_up_packages,
)
from apache_beam_vllm_dynamo._doctor_report import (
    Check,
    exit_status,
    failed_by,
    table,
    to_json,
    wants_colour,
)
from apache_beam_vllm_dynamo._doctor_subject import Subject
from apache_beam_vllm_dynamo._doctor_trial import try_start
from apache_beam_vllm_dynamo._placement import look_up_topology
from apache_beam_vllm_dynamo.config import DynamoVLLMEngineSpec
from apache_beam_vllm_dynamo.errors import ConfigurationError


def main(argv: Sequence[str] | None = None) -> int:
    """Looks at this machine and prints what was found; ``argv`` without the program's name."""
    parser = _parser()
    args = parser.parse_args(argv)
    checks: list[Check] = []
    subject = Subject()
    if args.config is not None:
        try:
            subject = subject_from_mapping(read_mapping(args.config))
            checks.append(Check.ok('config', args.config))
        except UnreadableFileError as error:
            parser.error(str(error))
        except ConfigurationError as error:
            checks.append(failed_by('config', error))
    env = {**os.environ, **subject.env_vars}
    checks += examine(subject, env, build=args.build)
    if args.start:
        checks.append(try_start(subject, env))
    if args.json:
        print(to_json(checks))
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(table(checks, colour=wants_colour(sys.stdout, os.environ), columns=columns))
    return exit_status(checks)


def examine(subject: Subject, env: Mapping[str, str], *, build: bool = False) -> list[Check]:
    """All checks but the trial start.

    Args:
      subject: What is to run.
      env: The environment of the servers.
      build: Whether this is the build of a worker image, where nothing is said of GPUs.
    """
    packages = look_up_packages()
    checks = [Check.ok('Python', f'{platform.python_version()}, {sys.executable}')]
    # A build is of an image for real engines.
    checks += check_packages(packages, subject.server, given=subject.given or build)
    checks += _flags(subject, packages, env, build=build)
    if subject.config is not None:
        checks.append(check_etcd(subject.config, env))
    model = look_up_model(subject, env) if subject.model_name else None
    if not build:
        checks += _gpus(subject, packages, env, model.weights_bytes if model else None)
    checks += check_this_machine(subject, _ranks(subject))
    if model is not None:
        found = (
            check_model(subject, model, env),
            check_weights(subject, model),
            check_template(subject, model),
        )
        checks += [check for check in found if check is not None]
    return checks


def _flags(
    subject: Subject, packages: Packages, env: Mapping[str, str], *, build: bool
) -> list[Check]:
    needed = {
        program: flags
        for program, flags in needed_flags(subject).items()
        # One that is not installed has been said to be missing.
        if packages.has_program(program)
    }
    answers = ask_for_help(needed, env)
    return check_flags(needed, answers, given=subject.given or build, without_gpus=build)


def _gpus(
    subject: Subject, packages: Packages, env: Mapping[str, str], weights_bytes: int | None
) -> list[Check]:
    topology = look_up_topology(env)
    gpus = look_up_gpus(env.get('PATH'))
    checks = [check_gpus(gpus, topology, subject)]
    visible = [gpu for gpu in gpus if is_visible(gpu, topology.gpus or ())]
    if visible and subject.server in ('gpu', 'native'):
        checks.append(check_driver(visible, cuda_major(packages)))
    if not subject.given:
        return checks
    placement, placed = check_placement(subject, topology)
    checks.append(placement)
    if placed is not None and placed.engine_kind != 'gpu':
        return checks
    engines = (
        placed.listed_engines if placed else (_native(subject),) if subject.config is None else ()
    )
    if visible and engines:
        checks.append(check_memory(visible, engines, weights_bytes))
        dtype = check_dtype(visible, engines)
        checks += [dtype] if dtype is not None else []
    return checks


def _native(subject: Subject) -> DynamoVLLMEngineSpec:
    return DynamoVLLMEngineSpec(vllm_server_kwargs=subject.native_kwargs)


def _ranks(subject: Subject) -> int:
    """How many processes the largest engine has on GPUs."""
    config = subject.config
    if config is None:
        return _native(subject).devices_needed
    if config.engine_kind != 'gpu':
        return 0
    specs = config.engines if isinstance(config.engines, tuple) else (config.engines.spec,)
    return max(spec.devices_needed for spec in specs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m apache_beam_vllm_dynamo.doctor',
        description='What is missing on this machine, and how to get it.',
        epilog='The exit status is 1 where a check failed.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--config', metavar='FILE', help="a handler's arguments by name, as JSON or YAML")
    add('--json', action='store_true', help='print JSON, for programs')
    add('--start', action='store_true', help='start the stack on simulated engines, and end it')
    add('--build', action='store_true', help='for the build of an image: nothing about GPUs')
    return parser


if __name__ == '__main__':
    sys.exit(main())
