"""The process's one event loop thread, with its one pool of connections.

Started by the first client, stopped by the last one; every handler, bundle and thread of
the process shares it. A forked child has none of the parent's threads, so state is kept by
process id, and the child starts its own. It keeps its copies of the parent's objects for
ever: to close them would disturb the sockets that both hold.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import resource
import threading

import aiohttp

# Below the five seconds after which uvicorn, vLLM's own server, closes an idle connection:
# one that the server closes while a request is on its way loses that request.
IDLE_CONNECTION_S = 4.0
# Half of the process's file descriptors, for Beam and the children's pipes need some too.
_DESCRIPTOR_SHARE = 0.5
_MAX_CONNECTIONS = 16384  # what one server address and one client address can hold, nearly
# Closing the sockets takes milliseconds; a bound keeps a bug from blocking a worker's exit.
_STOP_TIMEOUT_S = 10.0


class LoopThread:
    """One event loop in a daemon thread, alive while somebody holds it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._holders = 0
        self._serving = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None

    def acquire(self) -> asyncio.AbstractEventLoop:
        """Starts the thread if need be; every call is paired with one of :meth:`release`."""
        with self._lock:
            if not self._serving:
                self._holders = 0
                self._start()
            self._holders += 1
            assert self._loop is not None
            return self._loop

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stops the thread and closes all connections when nobody holds it any more."""
        with self._lock:
            # A loop that died was replaced for the others, who do not share this hold.
            if loop is self._loop:
                self._holders -= 1
                if self._holders == 0:
                    self._stop()

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this loop, which :meth:`acquire` gave, still runs."""
        return self._serving and loop is self._loop

    @property
    def session(self) -> aiohttp.ClientSession:
        """The process's connections; for use on the loop's thread while it is held."""
        assert self._session is not None
        return self._session

    def _start(self) -> None:
        started = threading.Event()
        self._loop = _new_loop()
        self._thread = threading.Thread(
            target=self._run, args=(self._loop, started), name='vllm-dynamo-client', daemon=True
        )
        self._thread.start()
        started.wait()
        # A daemon thread that still runs while the interpreter goes down leaves noise.
        atexit.register(self._stop_at_exit)

    def _run(self, loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        session: aiohttp.ClientSession | None = None
        try:
            session = self._session = loop.run_until_complete(_new_session())
            self._serving = True
            started.set()
            loop.run_forever()
        finally:
            # First, so that nobody takes hold of a loop that is about to close.
            self._serving = False
            started.set()
            loop.run_until_complete(_end(session))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
            loop.close()

    def _stop_at_exit(self) -> None:
        if self._pid == os.getpid():  # in a fork the lock may be held for ever
            # A client that is dropped at this moment may be about to stop it, too; a loop that
            # is stopped twice does not get to close its connections.
            with self._lock:
                self._stop()

    def _stop(self) -> None:
        thread, loop = self._thread, self._loop
        if thread is None or loop is None or self._pid != os.getpid():
            return
        atexit.unregister(self._stop_at_exit)
        if thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_TIMEOUT_S)
        self._thread = self._loop = self._session = None


_loops: dict[int, LoopThread] = {}


def loop_thread() -> LoopThread:
    """The loop thread of this process; nothing is started by asking for it."""
    return _loops.setdefault(os.getpid(), LoopThread())


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where it is installed, as it is beside vLLM; else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def max_connections() -> int:
    """How many connections the process may hold: half of the files that it may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = _MAX_CONNECTIONS
    return max(16, min(int(soft * _DESCRIPTOR_SHARE), _MAX_CONNECTIONS))


async def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=max_connections(),
            keepalive_timeout=IDLE_CONNECTION_S,
            ssl=False,  # the servers are on loopback; a TLS context would cost 20 ms
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={'Content-Type': 'application/json'},
        skip_auto_headers=('Accept', 'Accept-Encoding', 'User-Agent'),
        trust_env=False,  # a proxy of the environment must not get prompts for loopback
    )


async def _end(session: aiohttp.ClientSession | None) -> None:
    # The end of a task may let another one start.
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if session is not None:
        await session.close()
        # A closed transport lets its socket go one turn of the loop later.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
