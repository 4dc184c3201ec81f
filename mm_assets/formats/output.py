"""What writers write to: files that appear whole or not at all, spools beside them and splicing, files that grow.

The gathered writes of a writer go to its `WriteBehind`, whose thread writes them while the caller makes the next.

The temporary file `.<name>.tmp` is locked while its writer lives. A killed writer leaves it unlocked, and the next
writer of the same target truncates it. Spools have no name, so they never outlive their process. A file that grows is
locked itself, and every change of it is a positioned write, a truncation or a sync.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, Self

from mm_assets.formats.records import Buffer

JOINED_WRITE = 4 << 20  # bytes gathered before the operating system is called; with less, threads change too often
_MAX_PARTS = 1000  # of one call; the operating system takes 1024
_MAX_COPIED = 64 << 10  # of bytes that their owner may change, more are written at once
# Bytes of one call of the operating system: for more, ext4 on recent kernels looks for large pages, which takes several
# times as long as the writing.
_ONE_CALL = 256 << 10
_MAX_BEHIND = 16 << 20  # bytes that wait for the thread; four gathered writes, so that neither side waits for the other

# Answers of the kernel that mean "not between these two files": the bytes go through this process then.
_NO_SPLICE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


class HasDescriptor(Protocol):
    """An open file of the operating system."""

    def fileno(self) -> int:
        """The descriptor."""

    def close(self) -> None:
        """Closes it."""


class Spliceable(HasDescriptor, Protocol):
    """A file as `splice` takes it."""

    def flush(self) -> None:
        """Writes what is held back."""

    def tell(self) -> int:
        """Where the next byte goes."""

    def seek(self, position: int, /) -> object:
        """Moves to a position, where the next byte goes."""


class WriteBehind:
    """A thread that writes blocks one after the other, while their owner continues.

    It starts with the first block, and ends with `close` or when no reference to this is left. Waiting blocks keep
    their file open. For one thread of one process; a forked child may only drop it.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()  # blocks and their bytes, the oldest first
        self._size = 0  # of all that wait

    def submit(self, file: HasDescriptor, parts: Sequence[Buffer], size: int, position: int) -> None:
        """Takes a block, once the budget of waiting bytes allows it. A larger block is written before this returns.

        Args:
            file: where it goes; open, without a buffer.
            parts: the bytes, which must not change.
            size: how many they are.
            position: of the first.

        Raises:
            OSError: an earlier block could not be written, or this one where it is waited for.
        """
        self._wait(max(0, _MAX_BEHIND - size))
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="mm_assets-write")
        try:
            future = self._executor.submit(write_at, file, parts, position)
        except RuntimeError:  # the interpreter is ending, or no thread can be started
            # What was refused may be queued all the same, and must not be written later.
            executor, self._executor = self._executor, None
            self.drain()
            executor.shutdown(wait=True, cancel_futures=True)
            write_at(file, parts, position)
            return
        self._waiting.append((future, size))
        self._size += size
        if size > _MAX_BEHIND:
            self.drain()

    def drain(self) -> None:
        """Waits until nothing is left to write.

        Raises:
            OSError: a block could not be written; every later call raises it too.
        """
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Waits until at most `most` bytes are left to write."""
        while self._size > most:
            future, size = self._waiting[0]
            future.result()  # interrupted while waiting, the block is still the first
            self._waiting.popleft()
            self._size -= size

    def close(self) -> None:
        """Drops what has not begun, and ends the thread; may be called twice."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


def write_at(file: HasDescriptor, parts: Sequence[Buffer], position: int) -> None:
    """Writes all of the parts, one after the other, from a position on."""
    call: list[Buffer] = []
    size = 0
    for part in parts:
        pieces = [part]
        if len(part) > _ONE_CALL:
            view = memoryview(part)
            pieces = [view[at : at + _ONE_CALL] for at in range(0, len(view), _ONE_CALL)]
        for piece in pieces:
            if size + len(piece) > _ONE_CALL:
                _write_call(file, call, size, position)
                position += size
                call, size = [], 0
            call.append(piece)
            size += len(piece)
    _write_call(file, call, size, position)


def _write_call(file: HasDescriptor, parts: Sequence[Buffer], size: int, position: int) -> None:
    while size:
        count = os.pwritev(file.fileno(), parts, position)
        position += count
        size -= count
        if size:  # the operating system took a part of it
            parts = _rest(parts, count)


class JoinedFile:
    """A file that is written in order: small writes are gathered, and no byte that cannot change is copied.

    What is written may be held back until `flush`, and is lost by `close`.

    Args:
        raw: the file, open for writing and without a buffer; closed with this one.
        behind: writes for it, and raises its errors at a later call. Without it the caller's thread writes.
    """

    def __init__(self, raw: HasDescriptor, behind: WriteBehind | None = None) -> None:
        self._raw = raw
        self._behind = behind
        self._position = 0  # of the first byte that is held back
        self._parts: list[Buffer] = []
        self._size = 0

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._position + self._size

    def seek(self, position: int, /) -> None:
        """Moves to a position, where the next byte goes."""
        if position != self.tell():
            self._write_held_back(self._behind)
            self._position = position

    def write(self, data: Buffer, /) -> None:
        """Appends bytes; they may be changed afterwards."""
        size = len(data)
        if not size:
            return
        at_once = False
        if type(data) is not bytes:
            at_once = size > _MAX_COPIED
            data = data if at_once else bytes(data)
        self._parts.append(data)
        self._size += size
        if at_once:
            self.flush()
        elif self._size >= JOINED_WRITE or len(self._parts) >= _MAX_PARTS:
            self._write_held_back(self._behind)

    def write_all(self, parts: Sequence[Buffer]) -> None:
        """Appends several buffers, one after the other, as `write` does one."""
        size = 0
        for part in parts:
            if type(part) is not bytes:
                break
            size += len(part)
        else:  # nearly always: nothing has to be copied
            self._parts += parts
            self._size += size
            if self._size >= JOINED_WRITE or len(self._parts) >= _MAX_PARTS:
                self._write_held_back(self._behind)
            return
        for part in parts:
            self.write(part)

    def _write_held_back(self, behind: WriteBehind | None) -> None:
        parts, self._parts = self._parts, []
        size, self._size = self._size, 0
        position, self._position = self._position, self._position + size
        if len(parts) >= _MAX_PARTS:
            parts = [b"".join(parts)]  # so small that, waiting, they would take several times the memory of their bytes
        if behind is None:
            write_at(self._raw, parts, position)
        elif size:
            behind.submit(self._raw, parts, size, position)

    def flush(self) -> None:
        """Writes what is held back, and waits until all is written."""
        if self._behind is not None:
            self._behind.drain()
        self._write_held_back(None)  # it would be waited for: no thread is begun for a small file

    def fileno(self) -> int:
        """The descriptor."""
        return self._raw.fileno()

    def close(self) -> None:
        """Closes the file."""
        self._parts, self._size = [], 0
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rest(parts: Sequence[Buffer], count: int) -> list[Buffer]:
    """What is left of the parts after their first `count` bytes, of which there are fewer than all."""
    number = 0
    while count >= len(parts[number]):
        count -= len(parts[number])
        number += 1
    return [memoryview(parts[number])[count:], *parts[number + 1 :]]


class AtomicFile:
    """A file under construction beside its target. A process that is forked meanwhile does not change it.

    Args:
        path: the target; its folder must exist.

    Raises:
        IsADirectoryError: the target is a folder.
        BlockingIOError: another writer is at work on the same target.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            # The rename at the end would fail too, but after all the work.
            raise IsADirectoryError(errno.EISDIR, "a folder is where the file should be", str(path))
        self.path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._process = os.getpid()
        self._behind = WriteBehind()
        self._spools: list[JoinedFile] = []
        fd = _open_locked(self._temporary, path, "another writer is at work on this file", create=True)
        raw = os.fdopen(fd, "wb", 0)
        if os.fstat(raw.fileno()).st_size:  # what a killed writer left
            # Not for an empty file: ext4 starts to write out a file that was once truncated to nothing, all of it, when
            # it is closed, and the close waits for most of that.
            os.ftruncate(raw.fileno(), 0)
        self.file = JoinedFile(raw, self._behind)

    def is_forked(self) -> bool:
        """Whether this is a copy in a forked process: the file is its parent's, and the thread is not in it."""
        return self._process != os.getpid()

    def open_spool(self) -> JoinedFile:
        """A nameless file beside the target for bytes whose place in it is not known yet; closed with this one."""
        spool = open_spool(self.path.parent, self._behind)
        self._spools.append(spool)
        return spool

    def commit(self, *, fsync: bool) -> int:
        """Puts the file at its target.

        Args:
            fsync: wait until the bytes, then the name, are on the disk.

        Returns:
            The bytes of the file.
        """
        self.file.flush()
        self._behind.close()
        fd = self.file.fileno()
        if fsync:
            os.fsync(fd)
        size = os.fstat(fd).st_size
        os.replace(self._temporary, self.path)
        for file in (self.file, *self._spools):
            file.close()
        if fsync:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return size

    def abort(self) -> None:
        """Removes the temporary file; the target stays as it was. In a forked process, only closes it there."""
        if not self.is_forked():
            try:
                self._behind.close()
            finally:
                self._temporary.unlink(missing_ok=True)
        for file in (self.file, *self._spools):
            # The disk may have failed before and may fail again, which no longer matters.
            with contextlib.suppress(OSError):
                file.close()


class GrowingFile:
    """An existing local file, locked for one process that adds to it; a `ByteSource` of what is in it.

    Args:
        path: the file.
        fsync: whether `sync` waits for the disk.

    Raises:
        BlockingIOError: another process is adding to the file.
        OSError: there is no such file, or it may not be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
        self.path = Path(path)
        self.name = str(self.path)
        self._fsync = fsync
        self._fd = _open_locked(self.path, self.path, "another process is adding to this file", create=False)

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def size(self) -> int:
        """Bytes of the file as it is now."""
        return os.fstat(self._fd).st_size

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of one range, which the caller has checked."""
        data = bytearray(size)
        done = 0
        while done < size:
            count = os.preadv(self._fd, [memoryview(data)[done:]], offset + done)
            if not count:
                detail = f"the file ends at byte {offset + done}: it was truncated while being read"
                raise OSError(errno.EIO, detail, self.name)
            done += count
        return memoryview(data)

    def view_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each (offset, size)."""
        return [self.view(offset, size) for offset, size in ranges]

    def write(self, data: Buffer, position: int) -> None:
        """Writes all of `data` at a position."""
        write_at(self, [data], position)

    def truncate(self, size: int) -> None:
        """Makes the file end at `size`."""
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        """Waits until everything written so far is on the disk."""
        if self._fsync:
            os.fsync(self._fd)

    def check_at_place(self) -> None:
        """Raises `OSError` if the path names another file, so that what was added here is lost."""
        if not _is_at_place(self._fd, self.path):
            raise OSError(errno.ESTALE, "another writer replaced the file while something was added to it", self.name)

    def close(self) -> None:
        """Closes the file, which releases its lock."""
        os.close(self._fd)


def _open_locked(path: Path, target: Path, busy: str, *, create: bool) -> int:
    """Opens a file and locks it for this process.

    Raises:
        BlockingIOError: another process holds the lock; the message is `busy`, about `target`.
        OSError: it cannot be opened, or the system has no POSIX file locks.
    """
    try:
        import fcntl
    except ImportError as error:
        detail = "writing packed files needs POSIX file locks (fcntl), which this system lacks; reading does not"
        raise OSError(errno.EOPNOTSUPP, detail, str(target)) from error
    flags = os.O_RDWR | (os.O_CREAT | os.O_NOFOLLOW if create else 0)  # a system without fcntl may not have them
    while True:
        fd = os.open(path, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at_place(fd, path):
                return fd
        except BlockingIOError as error:
            os.close(fd)
            raise BlockingIOError(error.errno, busy, str(target)) from error
        except BaseException:
            os.close(fd)
            raise
        # Another writer finished between our open and our lock, and the name is another file's now, or no file's.
        os.close(fd)


def _is_at_place(fd: int, path: Path) -> bool:
    """Whether a path names the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def open_spool(folder: Path, behind: WriteBehind | None = None) -> JoinedFile:
    """A nameless file in `folder` for bytes whose place in the target is not known yet; see `JoinedFile`."""
    return JoinedFile(tempfile.TemporaryFile(dir=folder, buffering=0, prefix=".", suffix=".tmp"), behind)


def splice(spool: Spliceable, target: Spliceable, size: int) -> None:
    """Appends the first `size` bytes of a spool to the target at its position, in the kernel where it can."""
    spool.flush()
    target.flush()
    at = target.tell()
    done = _copy_in_kernel(spool.fileno(), target.fileno(), at, size)
    while done < size:
        block = os.pread(spool.fileno(), min(JOINED_WRITE, size - done), done)
        if not block:
            raise OSError(errno.EIO, f"a spool ends at byte {done} of {size}")
        write_at(target, [block], at + done)
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
