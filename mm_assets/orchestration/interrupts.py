"""Stopping: a signal ends a command's work in bounded time, and workers end with the command.

Dagster has handlers of its own while it runs a step, drops what arrives after the last one, and gives SIGTERM the
handler of SIGINT. So the number of a signal is read from the interpreter's wake-up file, where it arrives in any case.

A terminal sends SIGINT to every process of the command. The main thread blocks it, and the processes with which Dagster
copies a step's output inherit that, as workers do.
"""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["Stop", "Stopped", "sigterm_kept", "stoppable"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WAKE = signal.SIGURG  # ignored by default
UNWIND_SECONDS = 4.0  # for work in this process to end by itself; then it is abandoned


class Stopped(KeyboardInterrupt):
    """A signal stopped the command.

    Args:
        signum: SIGINT or SIGTERM.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


class Stop:
    """Whether a signal has arrived.

    Args:
        late: called with the signal's number, in a thread, when the work has not ended `UNWIND_SECONDS` after it.
    """

    def __init__(self, late: Callable[[int], object]) -> None:
        self._late = late
        self._raised = False
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="stop", daemon=True)

    def check(self) -> None:
        """Raises `Stopped` if a signal has arrived."""
        signum = self._arrived()
        if signum is not None:
            self._raised = True
            raise Stopped(signum)

    def _arrived(self) -> int | None:
        """The number of the first signal that stops; those of other signals, such as an alarm, are read and ignored."""
        with self._lock, suppress(BlockingIOError):
            while found := self._reading.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                if found[0] in SIGNALS:
                    return found[0]
                self._reading.recv(1)
        return None

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if not self._raised:  # a second one must not interrupt what the first one makes clean up
            self._raised = True
            raise Stopped(signum)

    def _watch(self) -> None:
        while self._reading.recv(1, socket.MSG_PEEK):
            signum = self._arrived()
            if signum is not None:
                # SIGINT arrived in this thread: let the main thread leave a system call and execute the handler.
                signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
                if not self._ended.wait(UNWIND_SECONDS):
                    self._late(signum)
                return

    @contextmanager
    def _listening(self) -> Iterator[None]:
        handlers = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
        handlers[_WAKE] = signal.signal(_WAKE, lambda *_: None)
        before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # not in that thread
        try:
            yield
        finally:
            self._ended.set()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.set_wakeup_fd(before)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            self._writing.close()  # ends the thread
            self._thread.join()
            self._reading.close()


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM after the block.

    A process that connects to a Ray cluster gets one that exits. In a step Dagster takes that for an error of the step,
    and does not repeat the run as one that was interrupted.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def stoppable(late: Callable[[int], object]) -> Iterator[Stop]:
    """Raises `Stopped` in the block, which the main thread executes, when SIGINT or SIGTERM arrives.

    Where Dagster runs a step at that time, its run fails instead, and `Stop.check` raises. `late` is as for `Stop`; it
    should end the process, since the block may be in code that cannot be interrupted.
    """
    stop = Stop(late)
    with stop._listening():
        yield stop
