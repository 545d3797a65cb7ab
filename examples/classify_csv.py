"""Say of each claim in a CSV file whether the document beside it supports the claim.

    python -m examples.classify_csv --model Qwen/Qwen3-0.6B --dynamo_engines 2 \
        --input claims.csv --output labelled

The input has the columns ``document`` and ``claim``, and others as it likes; rows of one document
may stand anywhere. The output has the same columns and ``label``, one of ``supported``,
``contradicted`` and ``not mentioned``, or ``error`` where there is no label.

Rows of one document begin alike, with a long text that an engine should read once. So the document
comes before the claim in what the model is asked, and ``PrefixBatchElements`` brings the rows of a
document together: to one worker, and there one after the other.

Arguments that ``--help`` does not list are options of the pipeline, such as ``--runner``.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.io import fileio
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.options.pipeline_options import PipelineOptions

from apache_beam_vllm_dynamo import (
    DynamoRuntimeConfig,
    InferenceError,
    LLMInference,
    OpenAIChatMessage,
    PrefixBatchElements,
    VLLMChatModelHandler,
)

Row = dict[str, str]

LABELS = ('supported', 'contradicted', 'not mentioned')
NEEDED = ('document', 'claim')
ADDED = ('label', 'error')

# The engine may write nothing but a label.
INFERENCE_ARGS = {'max_tokens': 8, 'temperature': 0, 'extra_body': {'guided_choice': list(LABELS)}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline that ``argv``, the arguments without the program's name, describes."""
    parser = make_parser()
    args, pipeline_args = parser.parse_known_args(argv)
    try:
        handler = make_handler(args)
        columns = read_columns(args.input)
    except ValueError as error:
        parser.error(str(error))
    with beam.Pipeline(options=PipelineOptions(pipeline_args)) as pipeline:
        rows = (
            pipeline
            | 'Match' >> fileio.MatchFiles(args.input)
            | 'Open' >> fileio.ReadMatches()
            | 'ReadRows' >> beam.FlatMap(read_rows)
        )
        _ = (
            classify(rows, handler)
            | 'Encode' >> beam.Map(to_line, (*columns, *ADDED))
            | 'Write'
            >> beam.io.WriteToText(
                args.output, file_name_suffix='.csv', header=','.join((*columns, *ADDED))
            )
        )
    return 0


def classify(rows: beam.PCollection[Row], handler: VLLMChatModelHandler) -> beam.PCollection[Row]:
    """The rows with their labels; those of one document are asked about one after the other."""
    labelled: beam.PCollection[Row] = (
        rows
        | 'Prompt' >> beam.Map(lambda row: (row, conversation(row)))
        | 'ByDocument' >> PrefixBatchElements(keyed=True)
        | 'OneByOne' >> beam.FlatMap()
        | 'Ask' >> LLMInference(KeyedModelHandler(handler), INFERENCE_ARGS)
        | 'Label' >> beam.Map(with_label)
    )
    return labelled


def make_handler(args: argparse.Namespace) -> VLLMChatModelHandler:
    """The model handler that the arguments describe.

    Raises:
      ConfigurationError: They cannot work, alone or together.
    """
    config = DynamoRuntimeConfig.for_devices(
        num_engines=args.dynamo_engines, engine_kind=args.engine_kind
    )
    return VLLMChatModelHandler(
        args.model, use_dynamo=True, dynamo_runtime_config=config, on_error='return'
    )


def read_columns(pattern: str) -> list[str]:
    """The columns of the input, from its first file.

    Raises:
      ValueError: There is no such file, or a column that is needed is missing.
    """
    [match] = FileSystems.match([pattern], limits=[1])
    if not match.metadata_list:
        raise ValueError(f'--input: there is no file {pattern}')
    path = match.metadata_list[0].path
    with as_text(FileSystems.open(path)) as file:
        columns = next(csv.reader(file), [])
    for needed in NEEDED:
        if needed not in columns:
            raise ValueError(f'--input: {path} has no column {needed}, but {", ".join(columns)}')
    return columns


def read_rows(readable: fileio.ReadableFile) -> Iterator[Row]:
    """The rows of a file; a field may hold line breaks, so that no file is read in parts."""
    with as_text(readable.open()) as file:
        yield from csv.DictReader(file)


def as_text(file: Any) -> io.TextIOWrapper:
    """A file of Beam as the csv module wants it, without the mark that spreadsheets begin with."""
    return io.TextIOWrapper(file, encoding='utf-8-sig', newline='')


def conversation(row: Row) -> list[OpenAIChatMessage]:
    """What the model is asked about a row: first what many rows share, last what is its own."""
    instruction = (
        'You are given a document, then a claim. Answer with "supported" if the document says so, '
        'with "contradicted" if it says otherwise, and with "not mentioned" if it does neither.'
        f'\n\nThe document:\n{row["document"]}'
    )
    return [OpenAIChatMessage('system', instruction), OpenAIChatMessage('user', row['claim'])]


def parse_label(content: str) -> str:
    """What the model wrote, as a label.

    Raises:
      ValueError: It is none.
    """
    label = content.strip().lower()
    if label not in LABELS:
        raise ValueError(f'no label: {content}')
    return label


def with_label(answered: tuple[Row, PredictionResult]) -> Row:
    """A row with its label, or with the reason why it has none."""
    row, result = answered
    response: Any = result.inference
    if isinstance(response, InferenceError):
        return row | {'label': '', 'error': str(response)}
    try:
        return row | {'label': parse_label(response.choices[0].message.content or ''), 'error': ''}
    except ValueError as error:
        return row | {'label': '', 'error': str(error)}


def to_line(row: Row, columns: Sequence[str]) -> str:
    """A row as CSV."""
    line = io.StringIO()
    csv.DictWriter(line, columns, lineterminator='', extrasaction='ignore').writerow(row)
    return line.getvalue()


def make_parser() -> argparse.ArgumentParser:
    """The arguments of this example."""
    parser = argparse.ArgumentParser(
        description='Say of each claim whether the document beside it supports the claim.',
        epilog='All other arguments are options of the pipeline, such as --runner.',
        allow_abbrev=False,  # an option of the pipeline may be the beginning of one of these
    )
    add = parser.add_argument
    add('--model', required=True, help='a hub name, or a directory that the workers can read')
    add('--input', required=True, help='a .csv file or pattern; all files have the same columns')
    add('--output', required=True, help='the files will be OUTPUT-00000-of-00001.csv and so on')
    add('--dynamo_engines', type=int, help='engines on each worker; default: one for each GPU')
    add('--engine_kind', choices=('gpu', 'cpu', 'simulated'), default='gpu')
    return parser


if __name__ == '__main__':
    logging.basicConfig()
    logging.getLogger('apache_beam_vllm_dynamo').setLevel(logging.INFO)
    sys.exit(main())
