"""Pages of PDFs: what is drawn and what is read of each, and what becomes of files that do harm."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from mm_assets.errors import MissingExtraError, ShardReadError
from mm_assets.media import pdf as media_pdf
from mm_assets.media.page_layouts import read_layout
from mm_assets.media.pdf import PdfError, PdfPages, frames_of, is_pdf

from ..pdf_files import A4, Page, Text, encrypted, pdf

HELLO = pdf(Page([Text("Hello wide world", 20, 150), Text("jumping fox", 40, 60)]))


def layout_of(data: bytes, dpi: int = 150) -> list[dict[str, Any]]:
    pages: list[dict[str, Any]] = json.loads(PdfPages(data, dpi).layout())["pages"]
    return pages


def words_of(data: bytes) -> list[list[str]]:
    return [page["words"] for page in layout_of(data)]


def picture(data: bytes, page: int = 0, dpi: int = 150) -> Image.Image:
    return Image.open(io.BytesIO(PdfPages(data, dpi).extract(page)))


def assert_words_are_in_their_boxes(image: Image.Image, boxes: Sequence[Sequence[int]]) -> None:
    """Each box holds ink up to two pixels from each of its sides, and there is none outside of all boxes."""
    ink = np.asarray(image.convert("L")) < 128
    left_over = ink.copy()
    for left, top, right, bottom in boxes:
        rows, columns = np.nonzero(ink[top:bottom, left:right])
        assert rows.min() <= 2
        assert columns.min() <= 2
        assert rows.max() >= bottom - top - 3
        assert columns.max() >= right - left - 3
        left_over[top:bottom, left:right] = False
    assert not left_over.any()


@pytest.mark.parametrize("rotation", [0, 90, 180, 270, -90, 450])
@pytest.mark.parametrize("crop", ["", "/CropBox [10 30 260 190]", "/CropBox [-50 -50 900 900]"])
@pytest.mark.parametrize("dpi", [72, 200])
def test_words_are_where_they_are_drawn(rotation: int, crop: str, dpi: int) -> None:
    """Boxes are in pixels of the rendered page, however it is turned, cropped and scaled."""
    texts = [Text("Hello wide world", 20, 150), Text("jumping fox", 40, 60)]
    data = pdf(Page(texts, entries=f"/Rotate {rotation} {crop}"))
    (page,) = layout_of(data, dpi)
    image = picture(data, dpi=dpi)
    assert image.size == (page["width"], page["height"])
    assert page["words"] == ["Hello", "wide", "world", "jumping", "fox"]
    assert page["lines"] == [0, 3]
    assert_words_are_in_their_boxes(image, page["boxes"])


def test_a_page_has_its_size_at_the_resolution() -> None:
    """A page of A4 has 8.27 x 11.7 inches, and the picture says its resolution."""
    image = picture(pdf(Page(size=A4)), dpi=100)
    assert image.size == (826, 1169)
    assert image.info["dpi"] == pytest.approx((100, 100), abs=0.01)


def test_gray_pages_are_gray_and_others_are_in_color() -> None:
    """A page without color is an image of one channel, drawn on white; one with a colored line has three."""
    assert picture(HELLO).mode == "L"
    assert picture(HELLO).getpixel((0, 0)) == 255
    red = picture(pdf(Page(content="1 0 0 rg 0 0 300 100 re f")))
    assert red.mode == "RGB"
    assert red.getpixel((5, red.height - 5)) == (255, 0, 0)
    assert red.getpixel((5, 5)) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["/Subtype /Widget /FT /Tx /T (name) /V (x)", "/Subtype /Stamp"])
def test_annotations_and_filled_form_fields_are_drawn(kind: str) -> None:
    """What readers see over a page, such as stamps and what is filled in on a form, is part of its image."""
    content = "0 0 1 rg 0 0 50 20 re f"
    look = f"<< /Type /XObject /Subtype /Form /BBox [0 0 50 20] /Length {len(content)} >>\nstream\n{content}\nendstream"
    note = f"<< /Type /Annot {kind} /F 4 /Rect [10 10 60 30] /AP << /N 6 0 R >> >>"
    data = pdf(Page(entries="/Annots [7 0 R]"), objects=[look, note, "<< /Fields [7 0 R] >>"])
    data = data.replace(b"/Type /Catalog", b"/AcroForm 8 0 R /Type /Catalog")
    assert picture(data, dpi=72).getpixel((20, 180)) == (0, 0, 255)
    assert words_of(data) == [[]]


def test_a_page_is_drawn_the_same_each_time() -> None:
    """Equal input gives equal bytes, also from another worker process."""
    first = PdfPages(HELLO).extract(0), PdfPages(HELLO).layout()
    media_pdf._Worker.stop()
    assert (PdfPages(HELLO).extract(0), PdfPages(HELLO).layout()) == first


def test_the_order_of_words_is_that_of_the_text_layer() -> None:
    """Two columns that are written one after the other are read so, though their lines are side by side."""
    columns = [Text(f"{side}{k}", x, 150 - 30 * k, 12) for side, x in (("left", 20), ("right", 160)) for k in range(3)]
    assert words_of(pdf(Page(columns))) == [["left0", "left1", "left2", "right0", "right1", "right2"]]


def test_a_line_break_ends_a_word_after_its_hyphen() -> None:
    """The halves of a word on two lines have a box each."""
    (page,) = layout_of(pdf(Page([Text("an exam-", 20, 150), Text("ple here", 20, 120)])))
    assert page["words"] == ["an", "exam-", "ple", "here"]
    assert page["lines"] == [0, 2]
    assert page["boxes"][1][3] <= page["boxes"][2][1] + 3


def test_text_of_every_direction_is_in_logical_order() -> None:
    """Hebrew and Arabic are read as they are spoken, with the first word at the right."""
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        figure = Figure(figsize=(4, 2))
        figure.text(0.2, 0.7, "שלום עולם")
        figure.text(0.1, 0.3, "up", rotation=90)
        target = io.BytesIO()
        figure.savefig(target, format="pdf")
    (page,) = layout_of(target.getvalue())
    assert page["words"] == ["שלום", "עולם", "up"]
    assert page["boxes"][0][0] > page["boxes"][1][2]
    assert_words_are_in_their_boxes(picture(target.getvalue()), page["boxes"])


def test_the_invisible_text_of_a_scan_is_read() -> None:
    """Text that recognition put over a scan without drawing it has words and boxes."""
    data = pdf(Page([Text("scanned words", 20, 100, operators="3 Tr")], content="0.5 g 0 0 300 200 re f"))
    (page,) = layout_of(data)
    assert page["words"] == ["scanned", "words"]
    assert np.asarray(picture(data)).max() < 200


def test_text_outside_of_the_page_is_left_out_and_at_its_edge_is_clipped() -> None:
    """Words on parts that the crop box hides are not in the image; boxes never leave it."""
    texts = [Text("hidden", 20, 150), Text("edge", 80, 40), Text("inside", 150, 100)]
    (page,) = layout_of(pdf(Page(texts, entries="/CropBox [100 0 300 130]")))
    assert page["words"][-1] == "inside"
    assert "hidden" not in page["words"]
    assert all(0 <= x0 < x1 <= page["width"] and 0 <= y0 < y1 <= page["height"] for x0, y0, x1, y1 in page["boxes"])


def test_a_page_without_text_has_no_words() -> None:
    """A page of lines alone, and an empty one, have a size and no words; so `document` packs them."""
    data = pdf(Page(content="10 10 m 200 100 l S"), Page())
    assert [(page["words"], page["boxes"], page["lines"]) for page in layout_of(data)] == [([], [], [])] * 2
    found = read_layout(json.loads(PdfPages(data).layout()))
    assert found is not None
    assert found.page_sizes is not None
    assert found.page_sizes.tolist() == [[625, 417], [625, 417]]


def test_characters_without_meaning_become_one_that_says_so() -> None:
    """What a font maps to nothing, to half a surrogate or to a control character is U+FFFD, which JSON can hold."""
    cmap = "/CIDInit begincmap 1 begincodespacerange <00> <ff> endcodespacerange 3 beginbfchar <41> <0000> <42> <D800> "
    stream = f"<< /Length {len(cmap) + 30} >>\nstream\n{cmap}<43> <0007> endbfchar endcmap    \nendstream"
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 6 0 R >>"
    page = Page([Text("ABCD", 20, 100)])
    data = pdf(page, objects=[stream, font]).replace(b"/F1 3 0 R", b"/F1 7 0 R")
    ((word,),) = words_of(data)
    assert word.endswith("D")
    word.encode()
    assert not any(ord(character) < 32 for character in word)


# -- limits and damage


def refused(data: bytes, *, page: int | None = None) -> PdfError:
    error = fault(data, page)
    assert error is not None
    assert PdfPages(HELLO).layout()  # another document is read as before
    return error


def fault(data: bytes, page: int | None = None) -> PdfError | None:
    """Reads the layout, or draws a page; what is wrong with it."""
    try:
        pages = PdfPages(data)
        pages.layout() if page is None else pages.extract(page)
    except PdfError as error:
        return error
    return None


def test_an_encrypted_file_is_refused_with_advice() -> None:
    """A file that needs a password is refused; one that only restricts printing is not."""
    error = refused(encrypted())
    assert error.kind == "encrypted_pdf"
    assert "decrypt it" in error.reason


def test_a_truncated_file_is_refused() -> None:
    """PDFium would read what is left of a truncated file and say nothing."""
    for size in (len(HELLO) - 10, len(HELLO) // 2, 600):
        error = refused(HELLO[:size])
        assert (error.kind, "truncated" in error.reason) == ("bad_pdf", True)


@pytest.mark.parametrize("end", [b"", b"\n\n", b"\0" * 4096, b"\r\n" + b" " * 60_000, b"\n<!-- some proxy -->" * 20])
def test_what_follows_the_end_does_not_matter(end: bytes) -> None:
    """Blanks, NULs and some more bytes may follow the mark of the end; so may bytes precede that of the start."""
    assert words_of(HELLO + end) == words_of(HELLO)
    assert words_of(b"junk before\n" + HELLO)


def test_what_is_no_pdf_is_refused() -> None:
    """Other files, and files with the marks of a PDF alone, are refused in words."""
    for data in (b"", b"GIF89a", b"%PDF-1.7", b"%PDF-1.7\n%%EOF", b"%PDF-1.7\n" + bytes(5000) + b"%%EOF"):
        assert refused(data).kind == "bad_pdf"


def test_a_document_without_pages_is_refused() -> None:
    """A page tree without pages is not a document; nor is one whose pages are missing."""
    assert refused(pdf()).kind == "bad_pdf"
    missing = pdf(Page(), count=3)
    assert refused(missing).kind == "bad_pdf"


def test_a_page_that_is_not_there_is_refused() -> None:
    """A locator may name any page."""
    assert "the PDF has 1" in refused(HELLO, page=1).reason
    assert refused(HELLO, page=2**31 - 1).kind == "bad_pdf"


@pytest.mark.parametrize("size", [(14_400 * 72, 14_400 * 72), (2**31 - 1, 2**31 - 1), (10**9, 1)])
def test_a_giant_page_is_refused_before_it_is_drawn(size: tuple[float, float]) -> None:
    """A page may claim 14,400 inches and more; a page of such a size would fill the memory of any host."""
    data = pdf(Page([Text("small", 10, 10)], size=size))
    assert refused(data).kind in ("pdf_too_large", "bad_pdf")
    assert refused(data, page=0).kind in ("pdf_too_large", "bad_pdf")


@pytest.mark.parametrize("box", ["[0 0 0 0]", "[300 200 0 0]", "[0 0 1e-30 5]", "[nan 0 1 1]", "[0]", "(a)", "99 0 R"])
def test_a_page_of_a_strange_size_is_read_or_refused(box: str) -> None:
    """Boxes that are empty, turned around or no boxes give a page of some size or an error, and never a crash."""
    data = pdf(Page([Text("small", 10, 10)], entries=f"/MediaBox {box} /CropBox {box}"))
    if fault(data) is None:
        (page,) = layout_of(data)
        assert picture(data).size == (page["width"], page["height"])


def test_a_file_of_thousands_of_pages_is_read_and_one_of_too_many_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pages is limited, whatever the file claims."""
    pages = [Page([Text(f"{k}", 10, 10)], size=(30, 30)) for k in range(2000)]
    assert [words for (words,) in words_of(pdf(*pages))] == [f"{k}" for k in range(2000)]
    monkeypatch.setattr(media_pdf, "MAX_PAGES", 1999)
    error = refused(pdf(*pages))
    assert (error.kind, "2,000 pages, allowed are 1,999" in error.reason) == ("pdf_too_large", True)
    assert words_of(pdf(Page(), count=2_000_000_000)) == [[]]  # there are as many as there are


def test_too_many_words_are_refused() -> None:
    """The text of a layout is limited like any other."""
    with pytest.raises(PdfError, match=r"more than 50 bytes of .*: raise samples.max_text_bytes") as error:
        PdfPages(HELLO).layout(max_bytes=50)
    assert error.value.kind == "pdf_too_large"


def has_crashed(error: PdfError | None) -> bool:
    return error is not None and "PDFium ended" in error.reason


def test_loops_of_objects_end() -> None:
    """Pages, resources and contents that refer to themselves are read or refused, and do not recurse for ever."""
    loops = [
        HELLO.replace(b"/Parent 2 0 R", b"/Parent 4 0 R"),
        HELLO.replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"),
        HELLO.replace(b"/Contents 5 0 R", b"/Contents 4 0 R"),
        HELLO.replace(b"/F1 3 0 R", b"/F1 4 0 R"),
        HELLO.replace(b"/Pages 2 0 R", b"/Pages 1 0 R"),
        pdf(Page(content="/X Do", entries="/Resources << /XObject << /X 6 0 R >> >>"), objects=[form("/X Do", 6)]),
        pdf(Page(content="/X Do", entries="/Resources << /XObject << /X 6 0 R >> >>"), objects=["6 0 R"]),
    ]
    for data in loops:
        assert not has_crashed(fault(data))
        assert not has_crashed(fault(data, 0))


def form(content: str, inner: int) -> str:
    entries = f"/Type /XObject /Subtype /Form /BBox [0 0 300 200] /Resources << /XObject << /X {inner} 0 R >> >>"
    return f"<< {entries} /Length {len(content)} >>\nstream\n{content}\nendstream"


def slow() -> bytes:
    """A page of a few hundred bytes whose forms draw each other ten times, nine levels deep."""
    many = "/X Do " * 10
    levels = [form(many, 7 + k) for k in range(9)]
    last = form("0 0 m 300 200 l 5 w S", 6)
    resources = "/Resources << /XObject << /X 6 0 R >> >>"
    return pdf(Page(content=many, entries=resources), objects=[*levels, last])


def test_a_page_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the processor is limited, and the document that took too much is not tried again."""
    monkeypatch.setattr(media_pdf, "SECONDS", 0.5)
    pages = PdfPages(slow())
    with pytest.raises(PdfError, match="seconds of a processor; leave the PDF out"):
        pages.extract(0)
    monkeypatch.setattr(media_pdf._Worker, "current", None)  # nothing is asked any more
    with pytest.raises(PdfError, match="seconds of a processor"):
        pages.extract(0)


def test_an_image_that_expands_without_end_does_no_harm() -> None:
    """A picture of a few kilobytes that claims gigabytes of pixels is left out or refused."""
    rows = zlib.compress(bytes(10 << 20), 9)
    body = "/Type /XObject /Subtype /Image /Width 100000 /Height 100000 /ColorSpace /DeviceRGB /BitsPerComponent 8"
    image = f"<< {body} /Filter /FlateDecode /Length {len(rows)} >>\nstream\n{rows.decode('latin-1')}\nendstream"
    resources = "/Resources << /XObject << /X 6 0 R >> >>"
    data = pdf(Page(content="300 0 0 200 0 0 cm /X Do", entries=resources), objects=["null"])
    data = data.replace(b"6 0 obj\nnull", b"6 0 obj\n" + image.encode("latin-1"))
    assert not has_crashed(fault(data, 0))
    assert PdfPages(HELLO).extract(0)


def test_a_crash_is_an_error_of_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker is killed the document is refused with the signal, and the next one is read by a new worker."""
    pages = PdfPages(HELLO)
    worker = media_pdf._Worker.current()
    os.kill(worker._process.pid, signal.SIGSEGV)
    monkeypatch.setattr(media_pdf._Worker, "current", lambda: worker)  # as if it was alive when it was asked
    with pytest.raises(PdfError, match="SIGSEGV"):
        pages.extract(0)
    with pytest.raises(PdfError, match="SIGSEGV"):
        pages.layout()
    monkeypatch.undo()
    assert PdfPages(HELLO).extract(0)
    assert media_pdf._Worker.current() is not worker


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGUSR1])
def test_a_worker_that_is_killed_refuses_no_document(signum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does to the worker is not held against a PDF, which is read again when it is asked for again."""
    pages = PdfPages(HELLO)
    worker = media_pdf._Worker.current()
    os.kill(worker._process.pid, signum)
    monkeypatch.setattr(media_pdf._Worker, "current", lambda: worker)
    with pytest.raises(ShardReadError, match=r"SIG(KILL|USR1).*run again"):
        pages.extract(0)
    monkeypatch.undo()
    assert pages.extract(0)
    worker = media_pdf._Worker.current()
    os.kill(worker._process.pid, signum)  # while it is idle
    worker._process.wait()
    assert pages.extract(0)


def test_an_interrupt_of_the_process_group_does_not_reach_the_worker() -> None:
    """A worker finishes its answer when its parent is asked to end, as the parent finishes its partition."""
    pages = PdfPages(HELLO)
    pages.extract(0)
    worker = media_pdf._Worker.current()
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker._process.pid, signum)
        assert pages.extract(0)
    assert media_pdf._Worker.current() is worker


def test_several_threads_and_documents_take_turns() -> None:
    """Threads get the pages of their own documents, though one document is open at a time."""
    texts = [f"document{k}" for k in range(4)]
    opened = [PdfPages(pdf(Page([Text(text, 10, 100)]))) for text in texts]
    found: list[set[str]] = [set() for _ in texts]

    def read(number: int) -> None:
        for _ in range(5):
            found[number].add(json.loads(opened[number].layout())["pages"][0]["words"][0])
            opened[number].extract(0)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{text} for text in texts]


def test_a_forked_process_has_a_worker_of_its_own() -> None:
    """A process that is forked while a document is open reads it, and leaves the worker of the first alone."""
    pages = PdfPages(HELLO)
    png = pages.extract(0)
    worker = media_pdf._Worker.current()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if pages.extract(0) == png and media_pdf._Worker.current() is not worker else 2
            media_pdf._Worker.stop()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pages.extract(0) == png
    assert media_pdf._Worker.current() is worker


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without pypdfium2 says how to install it."""
    monkeypatch.setattr(media_pdf, "can_read_pdf", lambda: False)
    with pytest.raises(MissingExtraError, match="needs pypdfium2, which is not installed: pip install"):
        PdfPages(HELLO)


def test_frames_are_of_tiffs_and_pdfs() -> None:
    """Whether a file has frames follows from its bytes, not from its name."""
    assert isinstance(frames_of(HELLO), PdfPages)
    assert frames_of(b"\x89PNG\r\n\x1a\n") is None
    assert is_pdf(b"junk" + HELLO)
    assert not is_pdf(bytes(2000) + HELLO)


@given(st.data())
def test_damage_gives_pages_or_an_error(data: st.DataObject) -> None:
    """A file with bytes changed, left out or repeated anywhere gives some pages or a `PdfError`, and nothing else."""
    content = bytearray(HELLO)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.integers(0, 20))
        content[at : at + length] = data.draw(st.binary(max_size=20))
    error = fault(bytes(content))
    if error is not None:
        assert error.kind in ("bad_pdf", "encrypted_pdf", "pdf_too_large")
        assert not has_crashed(error)
        return
    found = layout_of(bytes(content))
    for number, page in enumerate(found[:3]):
        assert picture(bytes(content), number).size == (page["width"], page["height"])
    assert read_layout({"pages": found}) is not None
