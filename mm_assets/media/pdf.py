"""Pages of a PDF: their pictures, and the words of their text layer, by PDFium in a process of its own.

PDFium is C++ that parses the files of strangers. It is not safe for threads or across a fork, and a damaged file may
crash it, loop in it or exhaust its memory. So each process that asks has one worker (`pdf_worker`), which holds one
document at a time and whose memory and processor time are limited. A document at which it ends is refused for good,
and the next document gets a new worker. The limits are of processor time, not of the clock, so that a busy host refuses
no other files than an idle one.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from mm_assets.errors import MediaError, MissingExtraError, ShardReadError
from mm_assets.media import pdf_worker
from mm_assets.media.content_types import Buffer, sniff_content_type
from mm_assets.media.pdf_worker import HEADER, MEMORY_BYTES
from mm_assets.media.tiff import TiffFrames

__all__ = ["DEFAULT_DPI", "MAX_BYTES", "Frames", "PdfError", "PdfPages", "can_read_pdf", "frames_of", "is_pdf"]

DEFAULT_DPI = 150  # text of 8 points is still legible, and a page of A4 has 2.2 million pixels
MAX_BYTES = 256 << 20  # of a file: it is held twice
MAX_PAGES = 10_000  # of a file: its words are held together
MAX_PIXELS = 1 << 26  # of a page: A0 at 200 dpi
SECONDS = 60.0  # of processor time to open a file, to read its words, and to draw one of its pages
SECONDS_PER_PAGE = 0.1  # more, to read the words of long files; a page of print takes a tenth of it
_HEADER_BYTES = 1024  # in which readers look for the mark of a PDF, and for that of its end
_NAME = "<pdf>"


class PdfError(MediaError):
    """A PDF, or a page of it, is refused.

    Args:
        reason: what was found and what to do.
        kind: short name of the kind of fault: ``bad_pdf``, ``encrypted_pdf`` or ``pdf_too_large``.
    """

    def __init__(self, reason: str, *, kind: str) -> None:
        self.kind = kind
        super().__init__(_NAME, reason)


def is_pdf(data: Buffer) -> bool:
    """Returns whether a file has the mark of a PDF where its readers look for it, which may be after other bytes."""
    return b"%PDF-" in bytes(memoryview(data)[:_HEADER_BYTES])


def can_read_pdf() -> bool:
    """Returns whether the extra ``pdf`` is installed."""
    return find_spec("pypdfium2_raw") is not None


class Frames(Protocol):
    """What single images are taken out of."""

    def extract(self, frame_index: int) -> bytes:
        """Returns a frame or page, from 0, as an image file; raises `MediaError` if it is damaged or missing."""


def frames_of(data: Buffer, *, pdf_dpi: int = DEFAULT_DPI) -> Frames | None:
    """Returns the frames of a TIFF, or the pages of a PDF as pictures; None if a file is neither.

    Raises:
        MediaError: the file is damaged, or too large.
        MissingExtraError: it is a PDF, and the extra is not installed.
    """
    if sniff_content_type(data) == "image/tiff":
        return TiffFrames(data)
    return PdfPages(data, pdf_dpi) if is_pdf(data) else None


class PdfPages:
    """The pages of a PDF in memory; safe for several threads, which wait for each other.

    Args:
        data: the whole file; it must stay alive and unchanged.
        dpi: pixels per inch of the pictures, in which boxes are counted.

    Raises:
        PdfError: the file is too large, or truncated; methods too.
        ShardReadError: from methods: the worker ended, and not because of the file.
        MissingExtraError: pypdfium2 is not installed.
    """

    def __init__(self, data: Buffer, dpi: int = DEFAULT_DPI) -> None:
        if not can_read_pdf():
            raise MissingExtraError("reading pages of a PDF", "pypdfium2")
        view = memoryview(data).cast("B")
        if len(view) > MAX_BYTES:
            raise PdfError(f"has {len(view):,} bytes, allowed are {MAX_BYTES:,}: split it", kind="pdf_too_large")
        if not is_pdf(view):
            raise PdfError(f"has no %PDF- in its first {_HEADER_BYTES:,} bytes: it is not a PDF", kind="bad_pdf")
        if b"%%EOF" not in bytes(view[-(_HEADER_BYTES + _num_blank(view)) :]):
            detail = f"has no %%EOF in its last {_HEADER_BYTES:,} bytes: it is truncated, or followed by other data"
            raise PdfError(f"{detail}; fetch it again or repair it", kind="bad_pdf")
        self._data = view
        self._number = next(_NUMBERS)
        self._fault = ""  # how the worker ended on it
        self._request = {"dpi": dpi, "max_pixels": MAX_PIXELS, "seconds": SECONDS}

    def layout(self, *, max_bytes: int = 1 << 30) -> str:
        """Returns sizes, words and boxes of all pages as JSON, in the form ``pages`` of `page_layouts`.

        Words are in the order of the text layer. Each page also has ``lines``, the indices of the words that begin a
        line. Equal input gives an equal text.

        Args:
            max_bytes: refuse a longer text.

        Raises:
            PdfError: the file is encrypted or damaged, or it or one of its pages is too large.
        """
        limits = {"max_pages": MAX_PAGES, "max_bytes": max_bytes, "seconds_per_page": SECONDS_PER_PAGE}
        pages = self._ask(limits, f"reading the words of the PDF took more than {SECONDS:g} seconds of a processor")
        return f'{{"pages":[{",".join(str(page, "utf-8") for page in pages)}]}}'

    def extract(self, frame_index: int) -> bytes:
        """Returns a page as PNG, gray if it has no color. Equal input gives equal bytes with one version of PDFium.

        Args:
            frame_index: the page, from 0.

        Raises:
            PdfError: there is no such page, or it is damaged or too large.
        """
        took = f"drawing page {frame_index} took more than {SECONDS:g} seconds of a processor"
        (png,) = self._ask({"page": frame_index}, took)
        return bytes(png)

    def _ask(self, request: dict[str, Any], took: str) -> Sequence[Buffer]:
        with _Worker.lock:
            if self._fault:
                raise PdfError(self._fault, kind="bad_pdf")
            worker = _Worker.current()
            try:
                if worker.document != self._number:
                    worker.document = -1
                    answer = worker.ask({**self._request, **request, "size": len(self._data)}, self._data)
                    worker.document = -1 if isinstance(answer, dict) else self._number
                else:
                    answer = worker.ask({**self._request, **request})
            except _EndedError as ended:
                if -ended.code not in _CRASHES:
                    detail = f"the process that reads PDFs ended with {_named(ended.code)}, which is not a PDF's fault"
                    advice = "free some memory if the host is short of it, and run again"
                    raise ShardReadError(_NAME, f"{detail}: {advice}") from None
                reason = took if ended.code == -signal.SIGXCPU else _crashed(ended.code)
                self._fault = f"{reason}; leave the PDF out"
                raise PdfError(self._fault, kind="bad_pdf") from None
        if isinstance(answer, dict) and "failure" in answer:
            _Worker.stop()
            raise ShardReadError(_NAME, f"the process that reads PDFs failed: {answer['failure']}")
        if isinstance(answer, dict):
            raise PdfError(answer["detail"], kind=answer["reason"])
        return answer


def _num_blank(view: memoryview) -> int:
    """Blanks and NULs at the end, with which some systems fill the last block of a file; at most 64 KiB of them."""
    tail = bytes(view[-(64 << 10) :])
    return len(tail) - len(tail.rstrip(b"\0 \t\r\n"))


# How a PDF may end the worker. Whatever else does is about the host.
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE, signal.SIGXCPU)


def _named(code: int) -> str:
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"exit status {code}"


def _crashed(code: int) -> str:
    memory = f"{MEMORY_BYTES >> 20:,} MiB"
    return f"PDFium ended with {_named(code)} on it: it is damaged, or needs more than {memory} of memory"


# -- the worker

_NUMBERS = itertools.count()


class _EndedError(Exception):
    """The worker ended before it answered."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Worker:
    """The process that opens PDFs.

    Attributes:
        lock: held while anything is asked or changed.
        document: number of the document that it holds; -1 for none.
    """

    lock = threading.Lock()
    _current: _Worker | None = None

    def __init__(self) -> None:
        self.document = -1
        # -P: the modules beside the worker are not to be found by their bare names.
        self._process = subprocess.Popen(
            [sys.executable, "-P", pdf_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # it is not to hold a pipe open that others read to its end
            bufsize=0,  # a forked process would write what is left in a buffer once more
        )

    @classmethod
    def current(cls) -> _Worker:
        """Returns this process's worker, which is started if there is none, or if it was killed while it was idle."""
        if cls._current is not None and cls._current._process.poll() is not None:
            cls.stop()
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @classmethod
    def stop(cls) -> None:
        """Ends this process's worker."""
        worker, cls._current = cls._current, None
        if worker is not None:
            worker._process.kill()
            worker._close()

    @classmethod
    def forget(cls) -> None:
        """Leaves the worker to the process that this one was forked from, whose lock may be held by another thread."""
        cls.lock = threading.Lock()
        worker, cls._current = cls._current, None
        if worker is not None:
            worker._process.returncode = 0  # it is not a child of this process
            worker._close()

    def ask(self, request: dict[str, Any], content: Buffer = b"") -> Sequence[Buffer] | dict[str, Any]:
        """Returns the parts of an answer, or reason and detail of a refusal.

        Raises:
            _EndedError: the worker ended.
        """
        try:
            head = json.dumps(request).encode()
            self._send(HEADER.pack(len(head)) + head)
            self._send(content)
            answer = json.loads(self._take(*HEADER.unpack(self._take(HEADER.size))))
            return [self._take(size) for size in answer["sizes"]] if "sizes" in answer else answer
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
        except BaseException:  # interrupted within a message: what is left of it would be taken for the next
            self.stop()
            raise
        self.stop()
        raise _EndedError(code)

    def _send(self, content: Buffer) -> None:
        pipe, left = self._process.stdin, memoryview(content)
        while left and pipe is not None:
            left = left[pipe.write(left) :]

    def _take(self, size: int) -> bytearray:
        pipe, content = self._process.stdout, bytearray(size)
        left = memoryview(content)
        while left and pipe is not None:
            count = os.readv(pipe.fileno(), [left])
            if not count:
                raise EOFError
            left = left[count:]
        return content

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


atexit.register(_Worker.stop)
os.register_at_fork(after_in_child=_Worker.forget)
