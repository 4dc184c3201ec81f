"""A filter for tests of many hosts: it notes where and when a partition is at work, and takes its time."""

import json
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Any

from mm_assets.filters.base import Filter


class Noting(Filter):
    """Drops nothing.

    Args:
        folder: for the notes. A file `.orders` there, JSON, says how long each block takes (`seconds`), and where one,
            the first there, takes longer (`slow_host`, `slow_seconds`), and how many hosts are to be at work before one
            goes on (`together`), and how the first one ends (`hang`): it is killed (`kill`), stopped by a signal
            (`stop`), or is in an endless loop (`loop`). It is not part of the declaration.
    """

    scope = "row"

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)

    def judge(self, block: Any) -> tuple[()]:
        key = str(block.table["sample_id"][0]).partition("-")[0]
        note = self.folder / f".{secrets.token_hex(8)}"
        note.write_text(f"{key} {socket.gethostname()}")
        note.rename(note.with_name(note.name[1:]))
        orders = json.loads((self.folder / ".orders").read_bytes())
        time.sleep(orders.get("seconds", 0.0))
        deadline = time.monotonic() + 120.0
        while self._num_hosts() < orders.get("together", 1):
            if time.monotonic() > deadline:
                raise RuntimeError("no other host began with this partition")
            time.sleep(0.05)
        if socket.gethostname() == orders.get("slow_host"):
            try:
                (self.folder / ".was_slow").touch(exist_ok=False)
            except FileExistsError:
                return ()
            time.sleep(orders["slow_seconds"])
        if "hang" in orders:
            try:
                (self.folder / ".has_hung").touch(exist_ok=False)
            except FileExistsError:
                return ()
            if orders["hang"] != "loop":
                os.kill(os.getpid(), signal.SIGSTOP if orders["hang"] == "stop" else signal.SIGKILL)
            while True:
                pass
        return ()

    def _num_hosts(self) -> int:
        return len({path.read_text().split()[1] for path in self.folder.iterdir() if path.name[0] != "."})
