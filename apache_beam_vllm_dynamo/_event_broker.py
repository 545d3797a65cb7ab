"""Carries Dynamo's event plane over two Unix sockets; a program of its own.

Without a broker every process binds its event sockets on all network interfaces. Run as
``python -P _event_broker.py IN OUT``: publishers connect to IN, subscribers to OUT.
"""

from __future__ import annotations

import sys

import zmq

# ZeroMQ drops what is above its default of 1,000, and a KV event lost in a burst leaves the
# router with a wrong picture of a cache; without any mark a hung subscriber fills the memory.
HIGH_WATER_MARK_MESSAGES = 1_000_000


def main(publishers: str, subscribers: str) -> None:
    """Passes every event on until the process ends."""
    context = zmq.Context()
    incoming = context.socket(zmq.XSUB)
    outgoing = context.socket(zmq.XPUB)
    incoming.set_hwm(HIGH_WATER_MARK_MESSAGES)
    outgoing.set_hwm(HIGH_WATER_MARK_MESSAGES)
    incoming.bind(publishers)
    outgoing.bind(subscribers)
    print('event broker ready', flush=True)
    zmq.proxy(incoming, outgoing)


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2])
