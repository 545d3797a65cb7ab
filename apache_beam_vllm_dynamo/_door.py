"""How the processes of one user on one machine ask each other: questions over a Unix socket.

The socket has a name in the abstract namespace, so that no file is left of it, and takes
connections of this user alone. Nothing here knows what is asked for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from apache_beam_vllm_dynamo._child_io import keep_from_forks

# A question is answered from memory, or with a look at some servers' metrics.
ANSWER_BOUND_S = 30.0
PAUSE_S = 0.1  # where there are too many files for one more
_LENGTH = struct.Struct('!I')
_CREDENTIALS = struct.Struct('3i')  # of struct ucred: process, user, group


class LineLostError(Exception):
    """Who was asked does not answer any more."""


class Visitor(Protocol):
    """One who has come in by a door."""

    def answer(self, question: str) -> object:
        """What becomes of a question; what it raises is raised where it was asked."""

    def leave(self) -> None:
        """Called once, when nothing more is asked."""


class Door:
    """Takes questions of other processes, each visitor on a thread of its own.

    Args:
      welcome: Makes what answers a visitor.
      name: What its threads are called.
    """

    def __init__(self, welcome: Callable[[], Visitor], name: str) -> None:
        self._welcome = welcome
        self._name = name
        self.address = f'\0vllm-dynamo-{os.getpid()}-{secrets.token_hex(8)}'
        self._lines_lock = threading.RLock()  # re-entrant: a garbage collection may close it
        self._lines: set[_Line] | None = set()
        self._socket = socket.socket(socket.AF_UNIX)
        # A fork that kept it would have others wait for an owner that is gone.
        keep_from_forks(self._socket)
        try:
            self._socket.bind(self.address)
            self._socket.listen()
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._take, name=f'{name} door', daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lets nobody in any more, and cuts off those who are; waits for no one."""
        with self._lines_lock:
            lines, self._lines = self._lines or (), None
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept()
        self._socket.close()
        for line in lines:
            line.cut()

    def _take(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                if self._lines is None:
                    return  # closed
                # No descriptor is free at present. Who knocks is let in once there is one again;
                # if nobody took them any more, they would wait for an answer for ever.
                time.sleep(PAUSE_S)
                continue
            line = _Line(accepted)
            with self._lines_lock:
                welcome = self._lines is not None and line.is_of_this_user()
                if welcome and self._lines is not None:
                    self._lines.add(line)
            if not welcome or not self._begin_to_serve(line):
                line.close()

    def _begin_to_serve(self, line: _Line) -> bool:
        thread = threading.Thread(
            target=self._serve, args=(line,), name=f'{self._name} visitor', daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # as many threads as there may be; the visitor will knock again
            with self._lines_lock:
                if self._lines is not None:
                    self._lines.discard(line)
            return False
        return True

    def _serve(self, line: _Line) -> None:
        visitor = self._welcome()
        try:
            while True:
                question = line.receive()
                try:
                    answer: tuple[bool, object] = (True, visitor.answer(question))
                except Exception as error:  # noqa: BLE001 - it is raised at the other end
                    answer = (False, _as_sent(error))
                line.send(answer)
        except (LineLostError, OSError):
            pass
        finally:
            line.close()
            with self._lines_lock:
                if self._lines is not None:
                    self._lines.discard(line)
            visitor.leave()


class Caller:
    """Asks through the door of another process.

    Args:
      address: What its ``Door`` says.

    Raises:
      LineLostError: Nobody is there.
    """

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(ANSWER_BOUND_S)  # the queue of one who takes nobody in may be full
        try:
            end.connect(address)
            end.settimeout(None)
        except OSError as error:
            end.close()
            raise LineLostError(str(error)) from error
        self._line = _Line(end)
        if not self._line.is_of_this_user():
            self._line.close()
            raise LineLostError('it belongs to another user')

    def ask(self, question: str) -> Any:
        """What the other process answers.

        Args:
          question: One that its visitors are answered.

        Raises:
          LineLostError: There is none, or not within half a minute.
          Exception: What the answer raised.
        """
        with self._lock:
            try:
                self._line.send(question)
                good, answer = self._line.receive(ANSWER_BOUND_S)
            except BaseException:
                self._line.close()  # an answer that came later would be taken for the next one
                raise
        if good:
            return answer
        raise answer

    def close(self) -> None:
        """Leaves; the other process is told by the kernel. Twice is no error."""
        self._line.cut()
        with self._lock:
            self._line.close()


def _as_sent(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - made in this line
    except Exception:  # noqa: BLE001 - whatever its class does
        return RuntimeError(f'{type(error).__name__}: {error}')
    return error


class _Line:
    """One connection; a fork of this process does not keep it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        keep_from_forks(end)

    def is_of_this_user(self) -> bool:
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())

    def send(self, message: object) -> None:
        data = pickle.dumps(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise LineLostError(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        try:
            self._socket.settimeout(timeout_s)
            [length] = _LENGTH.unpack(self._read(_LENGTH.size))
            return pickle.loads(self._read(length))  # noqa: S301 - it is of this user
        except OSError as error:
            raise LineLostError(str(error)) from error

    def cut(self) -> None:
        """Ends it for both, also where a thread waits for it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = b''
        while len(data) < length:
            piece = self._socket.recv(length - len(data))
            if not piece:
                raise LineLostError('it has ended')
            data += piece
        return data
