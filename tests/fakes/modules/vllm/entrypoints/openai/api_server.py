"""Stands in for vLLM's own server: the fake OpenAI server behind vLLM's command line.

RECORD_ARGUMENTS: a file that gets the arguments.
RECORD_STARTS: a file that gets a line with the process id at each start.
START_GATE: it listens as soon as this file is there.
EXIT_AT_START: it writes this and exits 1 when the gate is open.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[6]))

from tests.fake_server import FakeServer

parser = argparse.ArgumentParser()
parser.add_argument('--model', required=True)
parser.add_argument('--host', required=True)
parser.add_argument('--port', type=int, required=True)
parser.add_argument('--chat-template')
parser.add_argument('--max-num-seqs', type=int)
parser.add_argument('--data-parallel-size', type=int)
parser.add_argument('--enable-prefix-caching', action=argparse.BooleanOptionalAction)
arguments = parser.parse_args()

if record := os.environ.get('RECORD_ARGUMENTS'):
    seen = vars(arguments) | {'template_text': None}
    if arguments.chat_template:
        seen['template_text'] = pathlib.Path(arguments.chat_template).read_text()
    pathlib.Path(record).write_text(json.dumps(seen))

if starts := os.environ.get('RECORD_STARTS'):
    with pathlib.Path(starts).open('a') as file:
        file.write(f'{os.getpid()}\n')
gate = os.environ.get('START_GATE')
while gate and not pathlib.Path(gate).exists():
    time.sleep(0.01)
if reason := os.environ.get('EXIT_AT_START'):
    sys.exit(reason)

ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
with FakeServer(port=arguments.port):
    ended.wait()
