"""Names the process that works on a run, so that a run whose process is gone is detected.

The facts come from Linux's /proc. On other systems a process has no such name.
"""

import os
import socket
from pathlib import Path

__all__ = ["process_is_gone", "process_tag"]

_PROC = Path("/proc")
_DEAD_STATES = "ZX"  # killed, and not yet collected by its parent


def process_tag(run_id: str) -> str | None:
    """Identifies this process as the worker of a run; None on systems without /proc.

    The tag contains the run's id because a run that is executed again inherits the tags of its predecessor.
    """
    place, start = _place(), _start(os.getpid())
    if place is None or start is None:
        return None
    return " ".join((run_id, place, _boot(), str(os.getpid()), start))


def process_is_gone(run_id: str, tag: str | None) -> bool | None:
    """Whether the process that a run's tag names has ended.

    None where that is not known: there is no tag, it is another run's, or the process is on another host or of another
    boot of this one.
    """
    parts = (tag or "").split(" ")
    if len(parts) != 5 or parts[0] != run_id or parts[1] != _place() or not parts[3].isdecimal():
        return None
    if parts[2] != _boot():  # the machine restarted, or it is another one with the same name
        return None
    # A process id is reused, but not with the same start time, which counts from the boot.
    return _start(int(parts[3])) != parts[4]


def _place() -> str | None:
    """Host and process namespace, in which a process id is unique."""
    try:
        return f"{socket.gethostname()}/{os.readlink(_PROC / 'self' / 'ns' / 'pid')}"
    except OSError:
        return None


def _boot() -> str:
    return _read("sys/kernel/random/boot_id").strip() or "-"


def _read(name: str) -> str:
    """A file below /proc; empty where there is none."""
    try:
        return (_PROC / name).read_text()
    except OSError:
        return ""


def _start(pid: int) -> str | None:
    """Start time of a live process in clock ticks since the boot; None if no process has that id."""
    # The second field is the command's name in parentheses and may hold anything; the third is the state.
    fields = _read(f"{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in _DEAD_STATES else None
