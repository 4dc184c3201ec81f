"""The process that opens PDFs: it reads requests from standard input and writes an answer to each.

It is run by its path and imports nothing of this package, so that it starts fast. PDFium is C++ that parses the files
of strangers: here it may crash, loop or need too much memory without harm to the process that asks, which starts
another one. Processor time, memory and files are limited. That contains damage and accidents; it is not a sandbox for
code that has taken over the process.

Fonts that are not in the PDF are replaced by those built into PDFium, never by fonts of this host, so that a page
looks the same on every host.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["HEADER", "RefusedError", "main"]

HEADER = struct.Struct("<I")  # size of the JSON of a request or an answer; bytes that belong to it follow the JSON
MEMORY_BYTES = 2 << 30  # beyond what the process has when it starts; the largest page takes an eighth of it as pixels
POINTS_PER_INCH = 72
_REPLACEMENT = "\ufffd"
_HYPHEN = 0x02  # what PDFium gives for one at the end of a line
_ENCRYPTED = (4, 5)  # of FPDF_GetLastError: a password is needed, or an unknown security handler


class RefusedError(Exception):
    """A document, or a page of it, that is not read.

    Attributes:
        reason: short name of the kind of fault.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Document:
    """One open document.

    Args:
        library: PDFium.
        data: the file.

    Raises:
        RefusedError: it is encrypted, or no PDF that PDFium can open.
    """

    def __init__(self, library: Any, data: bytes) -> None:
        self._library = library
        self._data = data  # PDFium reads from it as long as the document is open
        self._handle = library.FPDF_LoadMemDocument64(data, len(data), None)
        if not self._handle:
            if library.FPDF_GetLastError() in _ENCRYPTED:
                raise RefusedError("encrypted_pdf", "cannot be opened without its password: decrypt it")
            raise RefusedError("bad_pdf", "is damaged beyond what PDFium can repair")
        # What is filled in on a form is drawn by this alone. It calls nothing: PDFium has no JavaScript here.
        self._form_info = library.FPDF_FORMFILLINFO(version=2)
        self._form = library.FPDFDOC_InitFormFillEnvironment(self._handle, self._form_info)

    def close(self) -> None:
        """Frees its memory."""
        if self._form:
            self._library.FPDFDOC_ExitFormFillEnvironment(self._form)
        self._library.FPDF_CloseDocument(self._handle)

    def layout(self, request: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the layout of each page as JSON.

        Raises:
            RefusedError: the document, or a page, is damaged or exceeds a limit.
        """
        num_pages = self._library.FPDF_GetPageCount(self._handle)
        if num_pages < 1:
            raise RefusedError("bad_pdf", "has no pages")
        if num_pages > request["max_pages"]:
            detail = f"has {num_pages:,} pages, allowed are {request['max_pages']:,}: split it"
            raise RefusedError("pdf_too_large", detail)
        _limit_time(request["seconds"] + request["seconds_per_page"] * num_pages)
        size = 0
        for number in range(num_pages):
            with _Page(self._library, self._handle, number, request) as page:
                content = json.dumps(page.layout(), ensure_ascii=False, separators=(",", ":")).encode()
            size += len(content) + 1
            if size > request["max_bytes"]:
                detail = (
                    f"has more than {request['max_bytes']:,} bytes of words and boxes up to page {number + 1:,} of "
                    f"{num_pages:,}: raise samples.max_text_bytes"
                )
                raise RefusedError("pdf_too_large", detail)
            yield content

    def render(self, request: Mapping[str, Any]) -> bytes:
        """Returns a page as PNG.

        Raises:
            RefusedError: there is no such page, or it is damaged or too large.
        """
        num_pages = self._library.FPDF_GetPageCount(self._handle)
        if not 0 <= request["page"] < num_pages:
            raise RefusedError(
                "bad_pdf", f"page {request['page']} was asked for, the PDF has {num_pages:,}, counted from 0"
            )
        _limit_time(request["seconds"])
        with _Page(self._library, self._handle, request["page"], request) as page:
            return page.render(request["dpi"], self._form)


class _Page:
    """A page while it is open.

    Attributes:
        width: pixels of its image.
        height: likewise.
    """

    def __init__(self, library: Any, document: Any, number: int, request: Mapping[str, Any]) -> None:
        self._library = library
        self._page = library.FPDF_LoadPage(document, number)
        if not self._page:
            raise RefusedError("bad_pdf", f"page {number} is damaged or missing")
        box = library.FS_RECTF()
        size = library.FPDF_GetPageWidthF(self._page), library.FPDF_GetPageHeightF(self._page)
        if not library.FPDF_GetPageBoundingBox(self._page, box) or not all(0 < side < math.inf for side in size):
            library.FPDF_ClosePage(self._page)
            raise RefusedError("bad_pdf", f"page {number} has no valid size")
        self._box = box.left, box.bottom, box.right, box.top  # in points, as if the page were not rotated
        self._rotation = library.FPDFPage_GetRotation(self._page)  # clockwise, in quarters
        self.width, self.height = (max(1, round(side * request["dpi"] / POINTS_PER_INCH)) for side in size)
        if self.width * self.height > request["max_pixels"]:
            library.FPDF_ClosePage(self._page)
            detail = (
                f"page {number} of {size[0] / POINTS_PER_INCH:,.1f} x {size[1] / POINTS_PER_INCH:,.1f} inches has "
                f"{self.width * self.height:,} pixels at {request['dpi']} dpi, allowed are {request['max_pixels']:,}: "
                "lower samples.pdf_dpi, or leave the PDF out"
            )
            raise RefusedError("pdf_too_large", detail)

    def __enter__(self) -> _Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.FPDF_ClosePage(self._page)

    # -- the text layer

    def layout(self) -> dict[str, Any]:
        """Returns size, words, boxes in pixels, and the index of the first word of each line."""
        words: list[str] = []
        boxes: list[tuple[int, int, int, int]] = []
        lines: list[int] = []
        begins_line = True
        for text, box, ends_line in self._text_words():
            placed = self._to_pixels(box)
            if placed is not None:  # else it is outside of the visible page
                if begins_line:
                    lines.append(len(words))
                    begins_line = False
                words.append(text)
                boxes.append(placed)
            begins_line |= ends_line
        return {"width": self.width, "height": self.height, "words": words, "boxes": boxes, "lines": lines}

    def _text_words(self) -> Iterator[tuple[str, list[float], bool]]:
        """Yields text and box in points of each word in the order of the text layer, and whether its line ends."""
        library = self._library
        text_page = library.FPDFText_LoadPage(self._page)
        if not text_page:
            return
        try:
            characters: list[str] = []
            box = [math.inf, math.inf, -math.inf, -math.inf]
            sides = ctypes.c_double(), ctypes.c_double(), ctypes.c_double(), ctypes.c_double()
            for index in range(library.FPDFText_CountChars(text_page)):
                code = library.FPDFText_GetUnicode(text_page, index)
                is_hyphen = code == _HYPHEN and library.FPDFText_IsHyphen(text_page, index) == 1
                character = "-" if is_hyphen else _character(code)
                if not character.isspace():
                    characters.append(character)
                    left, bottom, right, top = self._character_box(text_page, index, sides)
                    box = [min(box[0], left), min(box[1], bottom), max(box[2], right), max(box[3], top)]
                    if not is_hyphen:
                        continue
                ends_line = is_hyphen or character in "\r\n"
                if characters or ends_line:
                    yield "".join(characters), box, ends_line
                    characters, box = [], [math.inf, math.inf, -math.inf, -math.inf]
            if characters:
                yield "".join(characters), box, True
        finally:
            library.FPDFText_ClosePage(text_page)

    def _character_box(self, text_page: Any, index: int, sides: Any) -> tuple[float, float, float, float]:
        """Left, bottom, right and top of what a character draws; of one that draws nothing, the font's box."""
        left, right, bottom, top = sides
        self._library.FPDFText_GetCharBox(text_page, index, left, right, bottom, top)
        if left.value < right.value and bottom.value < top.value:
            return left.value, bottom.value, right.value, top.value
        loose = self._library.FS_RECTF()
        self._library.FPDFText_GetLooseCharBox(text_page, index, loose)
        return (
            min(loose.left, loose.right),
            min(loose.bottom, loose.top),
            max(loose.left, loose.right),
            max(loose.bottom, loose.top),
        )

    def _to_pixels(self, box: list[float]) -> tuple[int, int, int, int] | None:
        """A box in pixels of the image, rounded outwards and clipped to the page; None if nothing of it is there."""
        if not all(map(math.isfinite, box)):
            return None
        left, bottom, right, top = self._box
        width, height = right - left, top - bottom
        x0, x1 = (box[0] - left) / width, (box[2] - left) / width
        y0, y1 = (top - box[3]) / height, (top - box[1]) / height
        for _ in range(self._rotation % 4):
            x0, y0, x1, y1 = 1 - y1, x0, 1 - y0, x1
        placed = (
            min(max(math.floor(x0 * self.width), 0), self.width),
            min(max(math.floor(y0 * self.height), 0), self.height),
            min(max(math.ceil(x1 * self.width), 0), self.width),
            min(max(math.ceil(y1 * self.height), 0), self.height),
        )
        return placed if placed[0] < placed[2] and placed[1] < placed[3] else None

    # -- pixels

    def render(self, dpi: int, form: Any) -> bytes:
        """Returns the page as PNG, gray if it has no color.

        Args:
            dpi: stated in the PNG.
            form: of the document, which draws the fields on the page.
        """
        from PIL import Image, ImageChops

        library = self._library
        bitmap = library.FPDFBitmap_CreateEx(self.width, self.height, library.FPDFBitmap_BGRx, None, 0)
        if not bitmap:
            raise MemoryError
        try:
            library.FPDFBitmap_FillRect(bitmap, 0, 0, self.width, self.height, 0xFFFFFFFF)
            place = bitmap, self._page, 0, 0, self.width, self.height, 0, library.FPDF_ANNOT
            library.FPDF_RenderPageBitmap(*place)
            if form:
                library.FORM_OnAfterLoadPage(self._page, form)
                library.FPDF_FFLDraw(form, *place)
                library.FORM_OnBeforeClosePage(self._page, form)
            stride = library.FPDFBitmap_GetStride(bitmap)
            buffer = ctypes.string_at(library.FPDFBitmap_GetBuffer(bitmap), stride * self.height)
        finally:
            library.FPDFBitmap_Destroy(bitmap)
        image = Image.frombuffer("RGB", (self.width, self.height), buffer, "raw", "BGRX", stride, 1)
        red, green, blue = image.split()
        if ImageChops.difference(red, green).getbbox() is None and ImageChops.difference(red, blue).getbbox() is None:
            image = red
        target = io.BytesIO()
        image.save(target, "PNG", compress_level=6, dpi=(dpi, dpi))
        return target.getvalue()


def _character(code: int) -> str:
    """A character of the text layer; U+FFFD for one that has no meaning in Unicode."""
    if code in (9, 10, 11, 12, 13):
        return chr(code)
    if code < 0x20 or code > 0x10FFFF or 0xD800 <= code <= 0xDFFF or code in (0xFFFE, 0xFFFF):
        return _REPLACEMENT
    return chr(code)


def _limit_time(seconds: float) -> None:
    """Ends this process when it has worked so many processor seconds longer."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _limit_memory() -> None:
    import resource

    if sys.platform == "linux":  # elsewhere address space says little
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES,) * 2)
    for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))


def _library() -> Any:
    """PDFium, without the fonts of this host."""
    import pypdfium2_raw as library

    no_fonts = (ctypes.POINTER(ctypes.c_char) * 1)()  # a list of folders that ends at once
    config = library.FPDF_LIBRARY_CONFIG(version=2, m_pUserFontPaths=no_fonts)
    library.FPDF_InitLibraryWithConfig(config)
    return library


def _answers(library: Any, requests: BinaryIO) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Answers each request: JSON and the bytes that follow it."""
    document: _Document | None = None
    while head := requests.read(HEADER.size):
        request = json.loads(requests.read(*HEADER.unpack(head)))
        try:
            if "size" in request:
                if document is not None:
                    document.close()
                    document = None
                data = requests.read(request["size"])
                _limit_time(request["seconds"])
                document = _Document(library, data)
            if document is None:
                raise RefusedError("bad_pdf", "is not open")
            pieces = [document.render(request)] if "page" in request else list(document.layout(request))
        except RefusedError as refused:
            yield {"reason": refused.reason, "detail": str(refused)}, []
        except MemoryError:
            yield {"reason": "pdf_too_large", "detail": f"needs more than {MEMORY_BYTES >> 20:,} MiB of memory"}, []
        else:
            yield {"sizes": list(map(len, pieces))}, pieces


def main() -> None:
    """Answers requests until standard input ends."""
    # What ends the process that asks, or its group, is not to end this one within an answer, which would look like a
    # fault of the PDF. It ends with its input.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    try:
        from PIL import Image

        Image.preinit()  # before memory is limited
        library = _library()
        _limit_memory()
        for answer, pieces in _answers(library, sys.stdin.buffer):
            _send(answer, pieces)
    except Exception as error:  # noqa: BLE001  # a worker that ended without an answer would hide the reason; the parent raises it
        _send({"failure": f"{type(error).__name__}: {error}"}, [])


def _send(answer: Mapping[str, Any], pieces: Sequence[bytes]) -> None:
    head = json.dumps(answer).encode()
    sys.stdout.buffer.write(HEADER.pack(len(head)) + head)
    sys.stdout.buffer.writelines(pieces)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
