"""What the site makes of links out of docs/ and of docstrings."""

from __future__ import annotations

from apache_beam_vllm_dynamo._retry import DEFAULT_MAX_RETRIES, DEFAULT_MAX_WAIT_S
from tools import docs_site


def test_links_to_pages_and_files_of_the_repository_follow_them_into_the_site() -> None:
    text = (
        '[a](../examples/chat.yaml) [b](../containers/dataflow) [c](metrics.md#counters) '
        '[d](https://beam.apache.org) [e](#here) [f](../benchmarks/RESULTS.md)'
    )
    assert docs_site.with_site_links('guide.md', text) == (
        '[a](source/examples/chat.yaml) [b](container.md) [c](metrics.md#counters) '
        '[d](https://beam.apache.org) [e](#here) [f](measurements.md)'
    )
    assert list(docs_site.linked_files('guide.md', text)) == ['examples/chat.yaml']


def test_a_page_from_elsewhere_has_links_from_where_it_lies() -> None:
    text = '[a](constraints.txt)'
    moved = '[a](source/containers/dataflow/constraints.txt)'
    assert docs_site.with_site_links('container.md', text) == moved
    assert docs_site.with_site_links('quickstart.md', '[a](docs/guide.md)') == '[a](guide.md)'


def test_signatures_show_the_values_of_defaults() -> None:
    html = '<span>DEFAULT_MAX_RETRIES</span>, <code>DEFAULT_MAX_WAIT_S</code> DEFAULT_OF_OTHERS'
    assert docs_site.with_defaults(html) == (
        f'<span>{DEFAULT_MAX_RETRIES}</span>, <code>{DEFAULT_MAX_WAIT_S}</code> DEFAULT_OF_OTHERS'
    )


def test_roles_of_docstrings_become_references() -> None:
    html = (
        '<h3 id="apache_beam_vllm_dynamo.config.EngineKind">…</h3>'
        '<p>See :data:<code>EngineKind</code> or :class:<code>~apache_beam_vllm_dynamo.errors.A'
        '</code>::</p>'
    )
    assert docs_site.with_references(html) == (
        '<h3 id="apache_beam_vllm_dynamo.config.EngineKind">…</h3>'
        '<p>See <autoref identifier="apache_beam_vllm_dynamo.config.EngineKind">'
        '<code>EngineKind</code></autoref> or '
        '<autoref identifier="apache_beam_vllm_dynamo.errors.A"><code>A</code></autoref>:</p>'
    )
