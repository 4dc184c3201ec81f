"""The page cache: which files are in it, and putting them out of it or back in. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_BLOCK = 8 << 20  # bytes read at a time
_TRIES = 3  # a virtual machine's host may reclaim pages as soon as they are read
_WHOLE = 0.999  # of the pages


def files_of(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def evict(files: Iterable[Path]) -> None:
    """Put files out of the page cache. Pages that a process has mapped would stay, so none may have."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # a page that is not written yet would stay too
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_again(files: Iterable[Path]) -> None:
    """Read files from the first byte to the last, into nothing; again where the machine has taken pages back."""
    block = bytearray(_BLOCK)
    files = list(files)
    for _ in range(_TRIES):
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass
        if share_cached(files) > _WHOLE:
            return


def share_cached(files: Iterable[Path]) -> float:
    """The share of the files' pages that are in the page cache, 0 to 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
            states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            start = np.frombuffer(mapping, np.uint8)
            result = libc.mincore(
                ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)
            )
            del start  # a mapping with a view cannot be closed
            if result:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            found += int((states & 1).sum())
            pages += len(states)
    return found / max(pages, 1)
