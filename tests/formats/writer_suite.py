"""What both writers owe: determinism, refusals and atomicity. Abstract; subclassed in the tests of both readers."""

from __future__ import annotations

import errno
import math
import mmap
import os
import subprocess
import sys
import threading
import tracemalloc
import zlib
from pathlib import Path

import pytest

from mm_assets.errors import EncodeError
from mm_assets.formats import ModalitySpec, Payload
from mm_assets.formats import records as layout_module

from .examples import IMAGE, PROVENANCE, SAMPLES, SPECS, TEXT, Reader, Writer, write

PYTHONPATH = os.pathsep.join(str(Path(entry or ".").resolve()) for entry in sys.path)  # for other processes


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("mm_assets-write")]


class WriterSuite:
    """Tests of one writer; subclasses name it and its reader, and bring `file`."""

    writer: Writer
    reader: Reader

    # Determinism.

    def test_deterministic(self, tmp_path: Path, file: Path) -> None:
        """The same samples give the same bytes, in another process, and with the number of samples known."""
        known = write(self.writer, tmp_path / "known", num_samples=len(SAMPLES))
        assert known.read_bytes() == file.read_bytes()
        script = Path(__file__).parent / "golden" / "make_golden.py"
        extension = self.reader.format.lower()
        code = "import runpy, sys; runpy.run_path(sys.argv[1])['make']('pair', sys.argv[2], sys.argv[3])"
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
        command = [sys.executable, "-c", code, script, extension, tmp_path / "other"]
        subprocess.run(command, check=True, env=environment, cwd=tmp_path)
        assert (tmp_path / "other").read_bytes() == script.with_name(f"pair.{extension}").read_bytes()

    def test_order_of_modalities_is_the_callers(self, tmp_path: Path) -> None:
        """Modalities are in the order given; the order of a sample's keys does not matter."""
        first = write(self.writer, tmp_path / "x", [("a", dict(SAMPLES[0][1]))])
        turned = dict(reversed(SAMPLES[0][1].items()))
        assert write(self.writer, tmp_path / "y", [("a", turned)]).read_bytes() == first.read_bytes()
        with self.reader(write(self.writer, tmp_path / "z", [("a", turned)], [TEXT, IMAGE])) as reader:
            assert reader.names == ("text", "image")

    @pytest.mark.parametrize("num_samples", [None, 60])
    def test_memory(self, tmp_path: Path, num_samples: int | None) -> None:
        """Writing takes the memory of its buffers and tables, not of the payloads."""
        data = os.urandom(1 << 20)
        tracemalloc.start()
        try:
            samples = [(str(k), {"image": Payload(bytes(16), data)}) for k in range(60)]
            write(self.writer, tmp_path / "x", samples, num_samples=num_samples)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 20 << 20

    # What the writer refuses.

    def test_colliding_names_are_refused(self, tmp_path: Path) -> None:
        """Two names with one CRC-32 are refused, both named, and nothing is left behind."""
        names = ("plumless", "buckeroo")
        assert len({zlib.crc32(name.encode()) for name in names}) == 1
        specs = [ModalitySpec(name=name, type_id=1, metadata_size=8) for name in names]
        with pytest.raises(EncodeError, match=r"'plumless' and 'buckeroo' have the same CRC-32"):
            self.writer(tmp_path / "x", specs)
        with pytest.raises(EncodeError, match="two modalities are named 'text'"):
            self.writer(tmp_path / "x", [TEXT, TEXT])
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("count", [0, 33])
    def test_number_of_modalities(self, tmp_path: Path, count: int) -> None:
        """No modality, and more than 32, are refused."""
        specs = [ModalitySpec(name=f"m{k}", type_id=1, metadata_size=8) for k in range(count)]
        with pytest.raises(EncodeError, match=rf"{count} modalities, expected 1\.\.32"):
            self.writer(tmp_path / "x", specs)

    def test_not_json(self, tmp_path: Path) -> None:
        """Provenance and configurations that are not JSON are refused before anything is written."""
        nested: list[object] = []
        for _ in range(100_000):
            nested = [nested]
        for value in ({1}, math.nan, "\ud800", nested):
            with pytest.raises(EncodeError, match="not JSON"):
                self.writer(tmp_path / "x", SPECS, provenance={"key": value})
            spec = ModalitySpec(name="m", type_id=1, metadata_size=8, config={"key": value})
            with pytest.raises(EncodeError, match="not JSON"):
                self.writer(tmp_path / "x", [spec])
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("sample_id", "payloads", "message"),
        [
            ("n", {"sound": None}, r"sample 1 \('n'\): no modality 'sound' in this file; it has image, text"),
            ("n", {"text": Payload(b"1234567", b"")}, r"sample 1 \('n'\), modality 'text': .* 7 bytes, expected 8"),
            ("n", {"text": Payload(b"12345678", "a")}, "modality 'text': not contiguous bytes"),
            ("n", {"text": Payload(b"12345678", memoryview(b"abcd")[::2])}, "not contiguous bytes"),
            ("\ud800", {}, "the id cannot be written as UTF-8"),
        ],
    )
    def test_refused_samples(self, tmp_path: Path, sample_id: str, payloads: dict, message: str) -> None:
        """A refused sample is named in the error and leaves no trace: the writer goes on as if it had not come."""
        with self.writer(tmp_path / "x", SPECS, provenance=PROVENANCE, fsync=False) as writer:
            writer.write(*SAMPLES[0])
            with pytest.raises(EncodeError, match=message):
                writer.write(sample_id, payloads)
            assert writer.num_samples == 1
            for sample in SAMPLES[1:]:
                writer.write(*sample)
        assert (tmp_path / "x").read_bytes() == write(self.writer, tmp_path / "y").read_bytes()

    def test_duplicate_ids_are_refused(self, tmp_path: Path) -> None:
        """Two samples with one id are refused when the writer closes, both named; the target is untouched."""
        samples = [(str(k), {}) for k in range(50)]
        with pytest.raises(EncodeError, match="samples 7 and 50 share the id '7'"):
            write(self.writer, tmp_path / "x", [*samples, ("7", {})])
        assert list(tmp_path.iterdir()) == []

    def test_announced_number(self, tmp_path: Path) -> None:
        """More samples than announced are refused at once, fewer when the writer closes."""
        with pytest.raises(EncodeError, match=r"sample 4 \('more'\): num_samples announced 4 samples"):
            write(self.writer, tmp_path / "x", [*SAMPLES, ("more", {})], num_samples=4)
        with pytest.raises(EncodeError, match="4 samples came, 5 were announced"):
            write(self.writer, tmp_path / "x", num_samples=5)
        for number in (-1, 2**32):
            with pytest.raises(EncodeError, match="num_samples is"):
                self.writer(tmp_path / "x", SPECS, num_samples=number)
        assert list(tmp_path.iterdir()) == []

    def test_number_of_samples(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Past the largest number of samples the writer refuses, naming the limit."""
        assert layout_module.MAX_SAMPLES == 2**32 - 1
        monkeypatch.setattr("mm_assets.formats.writer.MAX_SAMPLES", 3)
        with pytest.raises(EncodeError, match="a file holds at most 3 samples"):
            write(self.writer, tmp_path / "x")

    def test_too_large(self, tmp_path: Path) -> None:
        """A payload of 4 GiB is refused before a byte of it is touched, naming sample and limit."""
        with mmap.mmap(-1, 2**32) as huge, self.writer(tmp_path / "x", SPECS, fsync=False) as writer:
            view = memoryview(huge)
            with pytest.raises(EncodeError, match=rf"sample 0 \('a'\): .* {2**32 - 1}"):
                writer.write("a", {"text": Payload(b"12345678", view)})
            with pytest.raises(EncodeError, match=str(2**32 - 1)):
                writer.write("a", {"text": Payload(b"12345678", view[8:])})
            view.release()

    # Atomicity.

    def test_target_appears_on_close(self, tmp_path: Path) -> None:
        """Until it closes a writer only has a dot-named file; then the target stands alone, and says what it is."""
        path = tmp_path / "x.bin"
        path.write_bytes(b"old")
        writer = self.writer(path, SPECS)
        for sample in SAMPLES:
            writer.write(*sample)
        assert path.read_bytes() == b"old"
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".x.bin.tmp", "x.bin"]
        summary = writer.close()
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]
        assert summary == writer.close()
        assert (summary.path, summary.num_samples, summary.num_bytes) == (path, 4, path.stat().st_size)
        assert summary.num_present == {"image": 2, "text": 2}
        with pytest.raises(ValueError, match="closed"):
            writer.write("z", {})
        with self.reader(path) as reader:
            assert len(reader) == 4

    @pytest.mark.parametrize("num_samples", [None, 9])
    def test_exception_leaves_target(self, tmp_path: Path, num_samples: int | None) -> None:
        """An exception in the caller's block removes everything and leaves the target as it was."""
        path = tmp_path / "x.bin"
        path.write_bytes(b"old")
        writer = self.writer(path, SPECS, num_samples=num_samples)

        def fail() -> None:
            with writer:
                writer.write(*SAMPLES[0])
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]
        with pytest.raises(ValueError, match="closed"):
            writer.close()
        writer.abort()

    def test_abort_inside_the_block(self, tmp_path: Path) -> None:
        """A writer aborted in its block leaves nothing, and the block ends quietly."""
        with self.writer(tmp_path / "x", SPECS) as writer:
            writer.abort()
        assert list(tmp_path.iterdir()) == []

    def test_failing_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write that fails ends the writer, and leaves nothing."""
        writer = self.writer(tmp_path / "x", SPECS)

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writer, "_append", fail)
        with pytest.raises(OSError, match="No space"):
            writer.write(*SAMPLES[0])
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ValueError, match="closed"):
            writer.write(*SAMPLES[0])

    def test_failing_spool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A spool that cannot be opened ends the writer before it starts, and leaves nothing."""

        def fail(*_: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("mm_assets.formats.output.open_spool", fail)
        with pytest.raises(OSError, match="Too many open files"):
            self.writer(tmp_path / "x", SPECS)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("num_samples", [None, 200])
    def test_full_disk(self, tmp_path: Path, num_samples: int | None) -> None:
        """What the disk does not take ends the writer, naming the target; no file, no thread is left."""
        code = (
            "import os, resource, sys, threading; from mm_assets.formats import *\n"
            f"w = {self.writer.__name__}(sys.argv[1], [ModalitySpec(name=n, type_id=1, metadata_size=8) for n in 'ab'],"
            f" num_samples={num_samples}, fsync=False)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))\n"
            "one = Payload(bytes(8), bytes(100_000))\n"
            "try:\n"
            "    for k in range(200): w.write(str(k), {'a': one, 'b': one})\n"
            "except OSError as error:\n"
            "    print(error.errno, error.filename, threading.active_count(), *os.listdir('.'), sep='|')\n"
            "try: w.close()\n"
            "except ValueError as error: print(error)"
        )
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        command = [sys.executable, "-W", "error", "-c", code, "x"]
        result = subprocess.run(command, check=True, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert result.stdout == f"{errno.EFBIG}|x|1\nthe writer of x is closed\n"

    @pytest.mark.parametrize("num_samples", [None, 100])
    def test_abort_during_writing(self, tmp_path: Path, num_samples: int | None) -> None:
        """Giving up while a thread writes leaves the target as it was, and no thread."""
        (tmp_path / "x").write_bytes(b"old")
        writer = self.writer(tmp_path / "x", SPECS, num_samples=num_samples)
        for k in range(30):
            writer.write(str(k), {"text": Payload(bytes(8), bytes(200_000))})
        assert writing_threads() != []
        writer.abort()
        assert writing_threads() == []
        assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"x": b"old"}

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("num_samples", [None, 30])
    def test_forked_copy(self, tmp_path: Path, num_samples: int | None) -> None:
        """A child that is forked during writing can neither continue nor give up for its parent, and does not hang."""
        samples = [(str(k), {"text": Payload(bytes(8), bytes([k]) * 200_000)}) for k in range(30)]
        with self.writer(tmp_path / "x", SPECS, num_samples=num_samples, provenance=PROVENANCE, fsync=False) as writer:
            for sample in samples[:20]:
                writer.write(*sample)
            child = os.fork()
            if child == 0:
                refused = 0
                for call in (lambda: writer.write(*samples[20]), writer.close):
                    try:
                        call()
                    except ValueError as error:
                        refused += "another process" in str(error)
                writer.abort()
                os._exit(0 if refused == 2 else 1)
            assert os.waitpid(child, 0)[1] == 0
            for sample in samples[20:]:
                writer.write(*sample)
        assert (tmp_path / "x").read_bytes() == write(self.writer, tmp_path / "y", samples).read_bytes()

    def test_killed_writer(self, tmp_path: Path) -> None:
        """What a killed writer leaves is one dot-named file, which the next writer of the target starts afresh."""
        code = (
            "import sys, os, signal; from mm_assets.formats import *\n"
            f"w = {self.writer.__name__}(sys.argv[1], [ModalitySpec(name='x', type_id=1, metadata_size=8)],"
            " num_samples=500)\n"
            "for k in range(500): w.write(str(k), {'x': Payload(bytes(8), bytes(100_000))})\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        path = tmp_path / "x.bin"
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        result = subprocess.run([sys.executable, "-c", code, path], check=False, env=environment)
        assert result.returncode == -9
        assert [entry.name for entry in tmp_path.iterdir()] == [".x.bin.tmp"]
        # 50 MB were taken, of which 24 MiB at most had not been written yet.
        assert (tmp_path / ".x.bin.tmp").stat().st_size > 20_000_000
        write(self.writer, path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]
        assert path.read_bytes() == write(self.writer, tmp_path / "y").read_bytes()

    def test_two_writers_of_one_target(self, tmp_path: Path) -> None:
        """A second writer of a target is refused while the first lives, and does not disturb it."""
        with self.writer(tmp_path / "x", SPECS) as writer:
            writer.write(*SAMPLES[0])
            with pytest.raises(BlockingIOError, match="another writer"):
                self.writer(tmp_path / "x", SPECS)
        with self.reader(tmp_path / "x") as reader:
            assert reader.verify().ok

    def test_provenance_may_be_learned_while_writing(self, tmp_path: Path) -> None:
        """Metadata added before the end is in the file; a value that is not JSON is refused and changes nothing."""
        with self.writer(tmp_path / "x", SPECS, provenance=PROVENANCE, fsync=False) as writer:
            writer.add_provenance("source_digest", "ab12")
            with pytest.raises(EncodeError):
                writer.add_provenance("partition", {1, 2})
        with self.reader(tmp_path / "x") as reader:
            assert reader.provenance == {**PROVENANCE, "source_digest": "ab12"}
        with pytest.raises(ValueError, match="closed"):
            writer.add_provenance("late", 1)
