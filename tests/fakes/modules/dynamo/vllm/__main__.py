"""Stands in for ``dynamo.vllm`` where it cannot start: writes ENGINE_LOG, exits ENGINE_EXIT."""

import os
import sys
import time

sys.stdout.write(os.environ.get('ENGINE_LOG', 'engine started') + '\n')
sys.stdout.flush()
if os.environ.get('ENGINE_EXIT'):
    sys.exit(int(os.environ['ENGINE_EXIT']))
time.sleep(3600)
