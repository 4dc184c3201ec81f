"""Files under construction: locks, leftovers, joined writes and splicing."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.formats import MstrReader, MstrWriter, MultReader, MultWriter, Payload, output
from mm_assets.formats.output import AtomicFile, WriteBehind, open_spool, splice

from .examples import SPECS, Reader, Writer, write
from .writer_suite import writing_threads


def test_commit(tmp_path: Path) -> None:
    """A commit puts the bytes at the target, which is readable as any new file, and says how many there are."""
    for fsync in (True, False):
        file = AtomicFile(tmp_path / "x")
        file.file.write(b"content")
        assert not (tmp_path / "x").exists() or fsync is False
        assert file.commit(fsync=fsync) == 7
        assert (tmp_path / "x").read_bytes() == b"content"
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~mask


def test_fsync_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes reach the disk before the name does, and the name before commit returns."""
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    AtomicFile(tmp_path / "x").commit(fsync=True)
    assert order == ["fsync", "replace", "fsync"]
    order.clear()
    AtomicFile(tmp_path / "x").commit(fsync=False)
    assert order == ["replace"]


def test_leftover_is_started_afresh(tmp_path: Path) -> None:
    """A file that a killed writer left behind is emptied, not appended to."""
    (tmp_path / ".x.tmp").write_bytes(b"left over, and longer")
    file = AtomicFile(tmp_path / "x")
    file.file.write(b"new")
    file.commit(fsync=False)
    assert (tmp_path / "x").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_folder_in_the_way(tmp_path: Path) -> None:
    """A folder at the target is refused at once; a missing parent too."""
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError):
        AtomicFile(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        AtomicFile(tmp_path / "missing" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_temporary_is_not_a_link(tmp_path: Path) -> None:
    """A link in the temporary file's place is not followed: what it points to stays."""
    (tmp_path / "precious").write_bytes(b"keep")
    (tmp_path / ".x.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        AtomicFile(tmp_path / "x")
    assert (tmp_path / "precious").read_bytes() == b"keep"


@pytest.mark.parametrize("successor", [True, False])
def test_name_taken_between_open_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, successor: bool) -> None:
    """If the other writer finishes between our open and our lock, we do not write into its finished file."""
    real = fcntl.flock
    raced = []

    def flock(fd: int, operation: int) -> None:
        if not raced:
            raced.append(fd)
            os.replace(tmp_path / ".x.tmp", tmp_path / "x")
            (tmp_path / "x").write_bytes(b"theirs")
            if successor:
                (tmp_path / ".x.tmp").write_bytes(b"third")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    file = AtomicFile(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"theirs"
    file.file.write(b"ours")
    file.commit(fsync=False)
    assert (tmp_path / "x").read_bytes() == b"ours"


def test_locks_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is an OSError, not a writer without protection."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks"):
        AtomicFile(tmp_path / "x")


def test_abort_on_a_full_disk(tmp_path: Path) -> None:
    """Giving up works when not even the joined bytes can be written."""
    file = AtomicFile(tmp_path / "x")
    file.file.write(b"never written")
    os.close(file.file.fileno())
    file.abort()
    assert list(tmp_path.iterdir()) == []


def test_spool_has_no_name(tmp_path: Path) -> None:
    """A spool is not seen in its folder, and so cannot be left over."""
    with open_spool(tmp_path) as spool:
        spool.write(b"x")
        spool.flush()
        assert list(tmp_path.iterdir()) == []


def refuse(number: int):
    def copy(*_: object) -> int:
        raise OSError(number, "no")

    return copy


class Copier:
    """copy_file_range in small pieces, that stops working after some."""

    def __init__(self, pieces: int, end: int | None) -> None:
        self.pieces, self.end = pieces, end

    def __call__(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copies up to 1000 bytes."""
        if not self.pieces:
            if self.end is None:
                return 0
            raise OSError(self.end, "no")
        self.pieces -= 1
        return os.pwrite(target, os.pread(source, min(count, 1000), at), to)


@pytest.mark.parametrize(
    "copy",
    [
        "kernel",
        None,
        refuse(errno.EXDEV),
        refuse(errno.ENOSYS),
        Copier(3, errno.EINVAL),
        Copier(2, None),
        Copier(10**6, None),
    ],
)
def test_splice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: object) -> None:
    """A spool arrives whole behind what was written before, whatever the kernel can or will not do."""
    if copy is None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    elif copy != "kernel":
        monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
    monkeypatch.setattr(output, "JOINED_WRITE", 4096)
    content = os.urandom(50_001)
    with open_spool(tmp_path) as spool, (tmp_path / "x").open("wb") as target:
        spool.write(content)
        target.write(b"before")
        splice(spool, target, len(content) - 1)
        target.write(b"after")
    assert (tmp_path / "x").read_bytes() == b"before" + content[:-1] + b"after"


def test_splice_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real fault of the disk is raised, and a spool that is too short is noticed."""
    with open_spool(tmp_path) as spool, (tmp_path / "x").open("wb") as target:
        spool.write(b"12345")
        with pytest.raises(OSError, match="a spool ends at byte 5 of 6"):
            splice(spool, target, 6)
        monkeypatch.setattr(os, "copy_file_range", refuse(errno.ENOSPC), raising=False)
        with pytest.raises(OSError, match="no"):
            splice(spool, target, 5)


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operating system takes in pieces is written whole."""
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:3]], at))
    with (tmp_path / "x").open("wb") as file:
        output.write_at(file, [b"0123456789"], 2)
    assert (tmp_path / "x").read_bytes() == b"\0\0" + b"0123456789"


def test_coalesced_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small writes are coalesced to about 4 MiB, which are written by calls of 256 KiB at most."""
    assert output.JOINED_WRITE == 4 << 20
    sizes = []
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *given: sizes.append(real(*given)) or sizes[-1])
    file = AtomicFile(tmp_path / "x")
    for _ in range(1100):
        file.file.write(bytes(8000))
    file.file.flush()
    assert sizes == [*2 * [*16 * [32 * 8000], 13 * 8000], 32 * 8000, 18 * 8000]
    file.abort()


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.binary(max_size=60)), max_size=30),
    piece=st.integers(1, 50),
    threaded=st.booleans(),
)
def test_coalesced_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bytes]], piece: int, threaded: bool
) -> None:
    """Whatever is written and wherever, with buffers changed afterwards and a system that takes pieces, arrives.

    By a thread as without one.
    """
    path = tmp_path_factory.mktemp("joined") / "x"
    expected = bytearray()
    real = os.pwritev

    def some(fd: int, parts: list[bytes], position: int) -> int:
        return real(fd, [memoryview(b"".join(parts))[:piece]], position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", some)
        patch.setattr(output, "JOINED_WRITE", 40)
        patch.setattr(output, "_MAX_PARTS", 5)
        patch.setattr(output, "_MAX_COPIED", 20)
        patch.setattr(output, "_MAX_BEHIND", 70)
        patch.setattr(output, "_ONE_CALL", 15)
        behind = WriteBehind() if threaded else None
        with output.JoinedFile(path.open("wb", buffering=0), behind) as file:
            for kind, data in steps:
                at = file.tell()
                if kind == 3:
                    at = len(data)
                    file.seek(at)
                mine = bytearray(data)
                if kind < 4:
                    file.write((data, mine, memoryview(mine), data)[kind])
                else:
                    file.write_all((data, b"", (data, mine)[kind - 4]))
                    data *= 2
                mine[:] = bytes(len(mine))
                assert file.tell() == at + len(data)
                expected.extend(bytes(max(0, at - len(expected))) if data else b"")
                expected[at : at + len(data)] = data
            file.flush()
            if behind is not None:
                behind.close()
    assert path.read_bytes() == bytes(expected)


def test_a_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are written by one other thread, which a small file does not begin and a commit ends."""
    real, writers = os.pwritev, set()

    def pwritev(*given: object) -> int:
        writers.add(threading.current_thread().name)
        return real(*given)

    monkeypatch.setattr(os, "pwritev", pwritev)
    for size, name in ((100_000, threading.current_thread().name), (5_000_000, "mm_assets-write_0")):
        file = AtomicFile(tmp_path / "x")
        file.file.write(bytes(size))
        file.commit(fsync=False)
        assert writers == {name}
        assert writing_threads() == []
        writers.clear()


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is slow the writer waits for it: only so many bytes are held, and a large block none too long."""
    real, ahead = os.pwritev, []
    file = AtomicFile(tmp_path / "x")

    def pwritev(fd: int, parts: list[bytes], position: int) -> int:
        time.sleep(0.002)
        ahead.append(file.file.tell() - position)
        return real(fd, parts, position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(output, "JOINED_WRITE", 1000)
    monkeypatch.setattr(output, "_MAX_BEHIND", 4000)
    for _ in range(100):
        file.file.write(bytes(500))
    assert 2000 < max(ahead) <= 4000 + 2 * 1000
    file.file.write(bytes(50_000))
    assert len(ahead) == 51
    file.abort()


@pytest.mark.parametrize("call", ["write", "flush", "seek", "commit"])
def test_a_block_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """What the thread could not write is said by whatever is called next, and said again; nothing is left."""
    file = AtomicFile(tmp_path / "x")
    monkeypatch.setattr(os, "pwritev", refuse(errno.ENOSPC))
    file.file.write(bytes(output.JOINED_WRITE))
    calls = {
        "write": lambda: file.file.write(bytes(5 * output.JOINED_WRITE)),  # more than may wait
        "flush": file.file.flush,
        "seek": lambda: (file.file.seek(0), file.file.flush()),
        "commit": lambda: file.commit(fsync=False),
    }
    for _ in range(2):
        with pytest.raises(OSError, match="no") as caught:
            calls[call]()
        assert caught.value.errno == errno.ENOSPC
    file.abort()
    assert list(tmp_path.iterdir()) == []
    assert writing_threads() == []


def test_abort_does_not_write_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving up waits for the block that is being written, and drops those behind it."""
    begun, go_on, written = threading.Event(), threading.Event(), []
    real = os.pwritev

    def pwritev(fd: int, parts: list[bytes], position: int) -> int:
        begun.set()
        go_on.wait(10)
        written.append(position)
        return real(fd, parts, position)

    def shutdown(self: ThreadPoolExecutor, **options: bool) -> None:
        """Lets the disk go on when nothing is waited for yet."""
        end(self, **{**options, "wait": False})
        go_on.set()
        end(self, **options)

    end = ThreadPoolExecutor.shutdown
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    monkeypatch.setattr(os, "pwritev", pwritev)
    file = AtomicFile(tmp_path / "x")
    for _ in range(3):
        file.file.write(bytes(output.JOINED_WRITE))
    assert begun.wait(10)
    file.abort()
    assert max(written) < output.JOINED_WRITE
    assert list(tmp_path.iterdir()) == []
    assert writing_threads() == []


def test_thread_of_a_forgotten_file(tmp_path: Path) -> None:
    """A file without references has written what it took, to itself and nowhere else, and its thread ends."""
    raw = (tmp_path / "x").open("wb", buffering=0)
    behind = WriteBehind()
    for k in range(3):
        behind.submit(raw, [bytes([k]) * 1000], 1000, 1000 * k)
    threads = writing_threads()
    assert len(threads) == 1
    del behind
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert (tmp_path / "x").stat().st_size == 3000
    raw.close()


def test_writing_while_the_interpreter_ends(tmp_path: Path) -> None:
    """What exit handlers write arrives, although no thread begins any more."""
    code = (
        "import atexit, sys; from pathlib import Path; from mm_assets.formats.output import AtomicFile\n"
        "file = AtomicFile(Path(sys.argv[1]))\n"
        "file.file.write(bytes(2_000_000))\n"
        "atexit.register(lambda: (file.file.write(b'x' * 2_000_000), file.commit(fsync=False)))"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path / "x"], check=True, timeout=200)
    assert (tmp_path / "x").read_bytes() == bytes(2_000_000) + b"x" * 2_000_000


def test_a_new_file_is_not_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a leftover is emptied: ext4 writes out, when it is closed, a file that was truncated to nothing."""
    cuts = []
    monkeypatch.setattr(os, "ftruncate", lambda *given: cuts.append(given))
    AtomicFile(tmp_path / "x").abort()
    assert cuts == []
    (tmp_path / ".x.tmp").write_bytes(b"left over")
    AtomicFile(tmp_path / "x").abort()
    assert len(cuts) == 1


@pytest.mark.parametrize(("writer", "reader"), [(MultWriter, MultReader), (MstrWriter, MstrReader)])
@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(st.tuples(*[st.none() | st.integers(0, 900)] * 2), max_size=40),
    joined=st.integers(1, 3000),
    behind=st.integers(1, 6000),
)
def test_same_bytes_however_they_are_written(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int | None, int | None]],
    joined: int,
    behind: int,
    writer: Writer,
    reader: Reader,
) -> None:
    """Blocks of whatever size, written by a thread, with and without the number known, give the same file."""
    folder = tmp_path_factory.mktemp("same")
    samples = [
        (
            str(k),
            {
                spec.name: None if size is None else Payload(bytes([k]) * spec.metadata_size, bytes([k + 1]) * size)
                for spec, size in zip(SPECS, sizes, strict=True)
            },
        )
        for k, sizes in enumerate(rows)
    ]
    expected = write(writer, folder / "x", samples).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "JOINED_WRITE", joined)
        patch.setattr(output, "_MAX_BEHIND", behind)
        for number in (None, len(samples)):
            found = write(writer, folder / "y", samples, num_samples=number)
            assert found.read_bytes() == expected
    with reader(folder / "x") as reader:
        assert reader.verify().ok


def test_what_is_not_flushed_is_dropped(tmp_path: Path) -> None:
    """Closing writes nothing: a writer that gives up touches the disk no more."""
    with output.JoinedFile((tmp_path / "x").open("wb", buffering=0)) as file:
        file.write(b"held back")
    assert (tmp_path / "x").read_bytes() == b""
