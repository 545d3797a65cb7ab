"""Stands in for vLLM's own server: the fake OpenAI server behind vLLM's command line."""

import argparse
import json
import os
import pathlib
import signal
import sys
import threading

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

ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
with FakeServer(port=arguments.port):
    ended.wait()
