"""Messages that libmpg123 writes to the process's standard error are withheld; those of others pass.

libsndfile offers no way to silence libmpg123. While a call of it runs, file descriptor 2 is a file in memory; after it
the lines that are not libmpg123's are written to the descriptor that it was. Calls in several threads share the file.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

__all__ = ["without_mpg123_messages"]

_STDERR = 2
_MESSAGE = re.compile(rb"\[[^\]\n]*mpg123|\n?(Note|Warning): |Hm, |Warning - ")  # how its lines begin
_FROM_MPG123 = (
    b"mpg123",
    b"MPEG",
    b"resync",
    b"Xing",
    b"header",
    b"stream",
    b"ID3",
    b"layer",
    b"frame",
    b"junk",
    b"input",
)
_lock = threading.Lock()


def _file_in_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("mpg123"), "w+b")
    return tempfile.TemporaryFile()  # of other systems than Linux


class _Diversion:
    """The diverted descriptor, and how many calls need it diverted."""

    def __init__(self) -> None:
        self.calls = 0
        self.original = -1
        self.file: IO[bytes] | None = None

    def begin(self) -> None:
        with _lock:
            if self.calls == 0:
                self._divert()
            self.calls += 1

    def end(self) -> None:
        with _lock:
            self.calls -= 1
            if self.calls == 0:
                self._restore()

    def _divert(self) -> None:
        try:
            file = _file_in_memory()
        except OSError:  # no room for it: the messages are not worth an MP3
            return
        try:
            self.original = os.dup(_STDERR)
        except OSError:  # closed: nothing is written to it
            file.close()
            return
        self.file = file
        os.dup2(file.fileno(), _STDERR)

    def _restore(self) -> None:
        if self.file is None:
            return
        os.dup2(self.original, _STDERR)
        self.file.seek(0)
        for line in self.file:
            is_message = _MESSAGE.match(line) and any(word in line for word in _FROM_MPG123)
            if not is_message and line.strip():
                os.write(_STDERR, line)
        self.file.close()
        os.close(self.original)
        self.file = None

    def forget(self) -> None:
        """In a child that was forked during a call: its standard error is the original one."""
        if self.file is not None:
            os.dup2(self.original, _STDERR)
            self.file = None
        self.calls = 0


_diversion = _Diversion()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _diversion.forget()


if hasattr(os, "register_at_fork"):  # other systems do not fork
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def without_mpg123_messages() -> Iterator[None]:
    """Withhold what libmpg123 writes to standard error in the block, which is a single call of libsndfile."""
    _diversion.begin()
    try:
        yield
    finally:
        _diversion.end()
