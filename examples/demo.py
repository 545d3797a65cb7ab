"""A pipeline on real engines, from start to end: ``python -m examples.demo --model DIRECTORY``.

It starts etcd, the frontend with the KV router and the engines on this machine, puts some
questions to the model through the pipeline of ``vllm_text_completion``, and shows the answers
and what each engine did. The exit status is 1 where a question has no answer, or where a real
model does not know the capital of France.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from examples import _demo_prompts

# Beam is imported when its messages have been turned down, some of which it logs on import.

Row = dict[str, Any]

SMALL_MODEL = 'SmolLM2-135M'
MAX_ENGINES = 2
MAX_TOKENS = 40
# Two for each engine. With all in flight at once, questions about one text would be prefilled
# side by side, before any of them could find the others' prefix in the cache.
MAX_IN_FLIGHT = 4
SIMULATED_SPEEDUP = 10  # of the time that a GPU would take


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; ``argv`` without the program's name."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--model', required=True, help='a hub name or a directory')
    parser.add_argument('--engine_kind', choices=('gpu', 'cpu', 'simulated'), default='cpu')
    args = parser.parse_args(argv)
    show_progress()

    began = time.monotonic()
    questions = _demo_prompts.rows()
    engines = count_engines(args.engine_kind)
    print(
        f'{len(questions)} questions for {args.model}, engine kind {args.engine_kind}\n'
        f'Starting etcd, the frontend with the KV router, and {engines} engines ...',
        flush=True,
    )
    if args.engine_kind == 'simulated':
        print('Simulated engines: what they answer is noise.', flush=True)
    elif SMALL_MODEL in args.model:
        print('A model this small writes well and is often wrong about the texts.', flush=True)
    with tempfile.TemporaryDirectory(prefix='demo-') as scratch:
        from apache_beam_vllm_dynamo import VLLMDynamoError

        try:
            run_pipeline(args.model, args.engine_kind, engines, f'{scratch}/answers')
        except VLLMDynamoError as error:
            print(f'FAILED: {error}')
            return 1
        # Their goodbyes would follow the table.
        logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.WARNING)
        answers = read_answers(Path(scratch))

    print_answers(questions, answers)
    print_engines(list(answers.values()), engines)
    problems = find_problems(questions, answers, real=args.engine_kind != 'simulated')
    for problem in problems:
        print(f'FAILED: {problem}')
    print(f'{time.monotonic() - began:.0f} s in all. Stopping the engines ...', flush=True)
    return 1 if problems else 0


def show_progress() -> None:
    """Let the package say what it does, and silence Beam, which logs what it raises anyway."""
    logging.basicConfig(level=logging.CRITICAL, format='  %(message)s', stream=sys.stdout)
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)


def count_engines(engine_kind: str) -> int:
    """Two, or one where there is one GPU."""
    if engine_kind != 'gpu':
        return MAX_ENGINES
    listed = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True, check=False)
    return max(1, min(MAX_ENGINES, listed.stdout.count('GPU ')))


def run_pipeline(model: str, engine_kind: str, engines: int, output: str) -> None:
    """Put all questions to the model; the answers are files that begin with ``output``."""
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    from examples.vllm_text_completion import ask

    inference_args = {
        'temperature': 0,
        'max_tokens': MAX_TOKENS,
        'extra_body': {
            'chat_template_kwargs': {'enable_thinking': False},
            'nvext': {'extra_fields': ['worker_id', 'timing']},
        },
    }
    handler = make_handler(model, engine_kind, engines)
    # This runner by name, because the default one looks for others to hand the work to.
    with beam.Pipeline(options=PipelineOptions(runner='FnApiRunner')) as pipeline:
        rows = pipeline | beam.Create(_demo_prompts.rows(), reshuffle=False)
        _ = (
            ask(rows, handler, inference_args)
            | beam.Map(to_record)
            | beam.Map(json.dumps)
            | beam.io.WriteToText(output, file_name_suffix='.jsonl')
        )


def make_handler(model: str, engine_kind: str, engines: int) -> Any:
    """A chat handler for small engines of one kind behind the KV router."""
    from apache_beam_vllm_dynamo import DynamoRuntimeConfig, VLLMChatModelHandler

    kwargs: Row = {'max-model-len': 2048, 'max-num-seqs': 16}
    env = {}
    if engine_kind == 'cpu':
        # Eager starts in a third of the time that compiling takes, and needs float32: its
        # bfloat16 gives wrong text on CPU cores.
        kwargs |= {'dtype': 'float32', 'enforce-eager': True}
        env = {'VLLM_CPU_KVCACHE_SPACE': '1', 'HF_HUB_OFFLINE': '1'}  # GiB for each engine
    config = DynamoRuntimeConfig.for_devices(
        num_engines=engines,
        engine_kind=engine_kind,
        kv_event_mode='zmq',
        vllm_server_kwargs=kwargs,
        simulation_kwargs={'speedup-ratio': SIMULATED_SPEEDUP},
        env=env,
    )
    return VLLMChatModelHandler(
        model,
        use_dynamo=True,
        dynamo_runtime_config=config,
        on_error='return',
        max_in_flight=MAX_IN_FLIGHT,
    )


def to_record(answered: tuple[Row, Any]) -> Row:
    """The example's record, with the engine and the times that Dynamo names on request."""
    from examples import vllm_text_completion

    extra = getattr(answered[1].inference, 'nvext', None) or {}
    timing = extra.get('timing') or {}
    received_ms = timing.get('request_received_ms', 0)
    return vllm_text_completion.to_record(answered) | {
        'engine': str((extra.get('worker_id') or {}).get('decode_worker_id', 'unknown')),
        'received_ms': received_ms,
        'answered_ms': received_ms + timing.get('total_time_ms', 0),
    }


def read_answers(directory: Path) -> dict[str, Row]:
    """The pipeline's output, by question."""
    lines = [line for path in directory.iterdir() for line in path.read_text().splitlines()]
    return {row['question']: row for row in map(json.loads, lines)}


def print_answers(questions: Iterable[Row], answers: dict[str, Row]) -> None:
    print()
    for row in questions:
        answer = answers.get(row['question'], {'completion': None, 'error': 'not in the output'})
        about = f'[{row["text"]}] ' if row['text'] else ''
        text = answer['completion'] or f'({answer["error"] or "empty"})'
        print(f'{about}{row["question"]}\n    {" ".join(text.split())}')


def print_engines(answers: Sequence[Row], engines: int) -> None:
    """A line for each engine, by the number that Dynamo gave it, and the speed of them all."""
    served = [row for row in answers if row['error'] is None]
    columns = ('prompt_tokens', 'cached_tokens', 'completion_tokens')
    print(f'\n{"engine":<22}{"requests":>9}{"prompt tokens":>15}{"cached":>9}{"generated":>11}')

    def line(name: str, rows: Sequence[Row]) -> None:
        prompt, cached, generated = (sum(row[column] for row in rows) for column in columns)
        print(f'{name:<22}{len(rows):>9}{prompt:>15,}{cached:>9,}{generated:>11,}')

    names = sorted({row['engine'] for row in served})
    for name in names:
        line(name, [row for row in served if row['engine'] == name])
    for _ in range(engines - len(names)):
        line('(another)', [])
    line('together', served)
    if served:
        first = min(row['received_ms'] for row in served)
        seconds = (max(row['answered_ms'] for row in served) - first) / 1000
        prompt, _, generated = (sum(row[column] for row in served) for column in columns)
        print(
            f'\n{generated / seconds:.1f} tokens per second generated and {prompt / seconds:.0f} '
            f'read, in the {seconds:.1f} s from the first request to the last answer'
        )


def find_problems(questions: Iterable[Row], answers: dict[str, Row], *, real: bool) -> list[str]:
    """What the demo should have shown and did not."""
    problems = [
        f'no answer to "{row["question"]}"'
        for row in questions
        if not (answers.get(row['question']) or {}).get('completion')
    ]
    about_france = answers.get(_demo_prompts.QUESTION_WITHOUT_TEXT, {}).get('completion') or ''
    if real and _demo_prompts.ITS_ANSWER not in about_france:
        problems.append(f'{_demo_prompts.ITS_ANSWER} is not in the answer about France')
    return problems


if __name__ == '__main__':
    sys.exit(main())
