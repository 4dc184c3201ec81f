"""Where writers write to: a file that appears whole or not at all, spools beside it, and splicing of one into another.

The temporary file `.<name>.tmp` carries a lock while its writer lives. What a killed writer left behind has none, and
the next writer of the same target starts it afresh. Spools have no name, so they never outlive their process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from mm_assets.formats.layout import Buffer

JOINED_WRITE = 4 << 20  # bytes gathered before the operating system is called; more brings no speed
FILL = bytes(8192)  # zeros for gaps: no fill is longer than a page

# Answers of the kernel that mean "not between these two files": the bytes go through this process then.
_NO_SPLICE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class AtomicFile:
    """A file under construction beside its target.

    Args:
        path: the target; its folder must exist.

    Raises:
        IsADirectoryError: the target is a folder.
        BlockingIOError: another writer is at work on the same target.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            # The rename at the end would say so too, after all the work.
            raise IsADirectoryError(errno.EISDIR, "a folder stands where the file should", str(path))
        self.path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self.file: IO[bytes] = os.fdopen(self._open_locked(), "wb", buffering=JOINED_WRITE)

    def _open_locked(self) -> int:
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._temporary, flags, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_place(fd):
                    os.ftruncate(fd, 0)  # what a killed writer left
                    return fd
            except BlockingIOError as error:
                os.close(fd)
                raise BlockingIOError(error.errno, "another writer is at work on this file", str(self.path)) from error
            except BaseException:
                os.close(fd)
                raise
            # Its writer finished between our open and our lock, and the name stands for another file now, or none.
            os.close(fd)

    def _is_at_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._temporary))
        except FileNotFoundError:
            return False

    def commit(self, *, fsync: bool) -> int:
        """Puts the file at its target.

        Args:
            fsync: wait until the bytes, then the name, are on the disk.

        Returns:
            The bytes of the file.
        """
        self.file.flush()
        fd = self.file.fileno()
        if fsync:
            os.fsync(fd)
        size = os.fstat(fd).st_size
        os.replace(self._temporary, self.path)
        self.file.close()
        if fsync:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return size

    def abort(self) -> None:
        """Removes the temporary file; the target stays as it was."""
        self._temporary.unlink(missing_ok=True)
        # Closing flushes what is joined so far; on a full disk that fails once more, and no longer matters.
        with contextlib.suppress(OSError):
            self.file.close()


def open_spool(folder: Path) -> IO[bytes]:
    """A nameless file in `folder` for bytes whose place in the target is not known yet."""
    return tempfile.TemporaryFile(dir=folder, buffering=JOINED_WRITE, prefix=".", suffix=".tmp")


def splice(spool: IO[bytes], target: IO[bytes], size: int) -> None:
    """Appends the first `size` bytes of a spool to the target at its position, in the kernel where it can."""
    spool.flush()
    target.flush()
    at = target.tell()
    done = _copy_in_kernel(spool.fileno(), target.fileno(), at, size)
    while done < size:
        block = os.pread(spool.fileno(), min(JOINED_WRITE, size - done), done)
        if not block:
            raise OSError(errno.EIO, f"a spool ends at byte {done} of {size}")
        write_at(target.fileno(), block, at + done)
        done += len(block)
    target.seek(at + size)


def _copy_in_kernel(source: int, target: int, at: int, size: int) -> int:
    """Copies up to `size` bytes and returns how many; fewer where the kernel will not."""
    copy = getattr(os, "copy_file_range", None)  # Linux has it
    done = 0
    while copy is not None and done < size:
        try:
            count = copy(source, target, size - done, done, at + done)
        except OSError as error:
            if error.errno not in _NO_SPLICE:
                raise
            break
        if not count:  # some file systems say so instead of refusing
            break
        done += count
    return done


def write_at(fd: int, data: Buffer, position: int) -> None:
    """Writes all of `data` at a position; the operating system may take it in pieces."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, position)
        view, position = view[count:], position + count
