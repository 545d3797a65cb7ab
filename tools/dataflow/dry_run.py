"""A runner that makes the whole job for Dataflow and sends it nowhere.

It is Beam's own runner up to the last step. What would be uploaded is written into a directory:
the pipeline, the job as the service would be asked for it, and the packages. No credentials are
looked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    TestOptions,
)
from apache_beam.runners.dataflow import dataflow_runner
from apache_beam.runners.dataflow.internal import apiclient

from tools.dataflow.tasks import DRY_RUN_DIRECTORY, JOB_FILE


class DataflowRunner(dataflow_runner.DataflowRunner):
    """Beam's, which checks the options of runners of this name alone."""

    def run_pipeline(
        self, pipeline: Any, options: PipelineOptions, pipeline_proto: Any = None
    ) -> Any:
        """Makes the job."""
        options.view_as(TestOptions).dry_run = False
        options.view_as(StandardOptions).runner = 'DataflowRunner'
        with mock.patch.object(apiclient, 'DataflowApplicationClient', _FileClient):
            return super().run_pipeline(pipeline, options, pipeline_proto)


class _FileClient(apiclient.DataflowApplicationClient):
    """The client of the service, without the service and Cloud Storage."""

    def __init__(self, options: PipelineOptions, root_staging_location: str | None = None) -> None:
        self._directory = Path(os.environ[DRY_RUN_DIRECTORY])
        cloud = options.view_as(GoogleCloudOptions)
        cloud.no_auth = True
        super().__init__(options, root_staging_location)
        cloud.no_auth = False

    def stage_file(
        self,
        gcs_or_local_path: str,  # noqa: ARG002 - where it would be uploaded to
        file_name: str,
        stream: BinaryIO,
        mime_type: str = '',  # noqa: ARG002 - of no use for a file
        total_size: int | None = None,  # noqa: ARG002 - of no use for a file
    ) -> None:
        """Writes what would be uploaded."""
        (self._directory / file_name).write_bytes(stream.read())

    def submit_job_description(self, job: apiclient.Job) -> None:
        """Writes what the service would be asked for."""
        (self._directory / JOB_FILE).write_text(job.json(), encoding='utf-8')
