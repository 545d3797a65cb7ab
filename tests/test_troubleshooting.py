"""The page of error texts has each that the code has, and none that it has no more."""

from __future__ import annotations

import re

from apache_beam_vllm_dynamo._diagnosis import KNOWN, UNKNOWN, diagnose
from tests.support.error_texts import HOLE, all_texts, first_sentence, matches
from tests.support.processes import ROOT

PAGE = (ROOT / 'docs' / 'troubleshooting.md').read_text()
OF_TEXTS = 'text on the screen'
OF_LOGS = 'in the log'
TEXTS = all_texts()


def rows(header: str) -> list[tuple[list[str], str]]:
    """The rows of all tables whose first column has that name: its code, and the second column."""
    found = []
    for table in re.findall(r'(?:^\|.*\n)+', PAGE, re.MULTILINE):
        cells = [re.split(r' \| |^\| | \|$', line)[1:-1] for line in table.splitlines()]
        if cells[0][0] == header:
            found += [(re.findall(r'`(.+?)`', first), second) for first, second in cells[2:]]
    return found


ENTRIES = [entry for entries, _ in rows(OF_TEXTS) for entry in entries]


def test_the_texts_are_found_in_the_code() -> None:
    """Raised, returned, logged and diagnosed ones; else the page would be compared with nothing."""
    found = {text.pattern.partition(HOLE)[0] for text in TEXTS}
    assert {
        'The list of messages is empty: filter such elements out.',
        'The engines need GPU ',
        'Requests wait for the server: ',
        'Not ready after ',
        'given up after ',
        'The GPU has too little memory for it',
        'invalid_request (',
    } <= found
    assert len(TEXTS) > 200


def test_each_text_has_an_entry() -> None:
    """Add one to docs/troubleshooting.md: its beginning, with … for what differs."""
    entries = ENTRIES + [first_sentence(second) for _, second in rows(OF_LOGS)]
    missing = [
        f'{text.where}: {text.pattern.replace(HOLE, "…")}'
        for text in TEXTS
        if not any(matches(entry, text.pattern) for entry in entries)
    ]
    assert not missing


def test_each_entry_is_a_text_that_the_code_has() -> None:
    """Take it out where the text is gone, or write it as it is now."""
    gone = [e for e in ENTRIES if not any(matches(e, text.pattern) for text in TEXTS)]
    assert not gone


def test_no_entry_is_there_twice_or_matches_everything() -> None:
    assert len(set(ENTRIES)) == len(ENTRIES)
    vague = [entry for entry in ENTRIES if len(re.sub(r'\W', '', entry)) < 6]
    # How a child ended, and a reserved flag: the rest of their texts is made elsewhere.
    assert vague == ['… ended: …', '… sets …']


def test_what_a_log_means_is_what_the_error_says() -> None:
    """Each line of a log is taken for that cause, and each cause has a line."""
    causes = set()
    for entries, said in rows(OF_LOGS):
        for entry in entries:
            diagnosis = diagnose([entry])
            assert diagnosis is not UNKNOWN, entry
            assert diagnosis.hint.startswith(said), entry
            causes.add(diagnosis.cause)
    assert causes == {diagnosis.cause for _, diagnosis in KNOWN}
