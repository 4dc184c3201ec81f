"""Small PDFs, written by hand so that a test says what is in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

A4 = (595, 842)


class Text(NamedTuple):
    """A text in Helvetica at a place in points, from the lower left corner of the page."""

    text: str
    x: float
    y: float
    size: float = 20
    operators: str = ""  # before it is drawn


class Page(NamedTuple):
    """A page; `entries` are further ones of its dictionary, `content` further operators."""

    texts: Sequence[Text] = ()
    size: tuple[float, float] = (300, 200)
    entries: str = ""
    content: str = ""


def pdf(*pages: Page, objects: Iterable[str] = (), trailer: str = "", count: int | None = None) -> bytes:
    """A PDF of these pages.

    Args:
        pages: its pages.
        objects: bodies of further objects, whose numbers follow those of the pages.
        trailer: further entries of the trailer.
        count: of pages, as the file says it.
    """
    kids = " ".join(f"{4 + 2 * k} 0 R" for k in range(len(pages)))
    bodies = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages) if count is None else count} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for number, page in enumerate(pages):
        drawn = "".join(
            f"BT {t.operators} /F1 {t.size} Tf {t.x} {t.y} Td ({_escaped(t.text)}) Tj ET\n" for t in page.texts
        )
        content = drawn + page.content
        width, height = page.size
        bodies += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width} {height}] /Contents {5 + 2 * number} 0 R "
            f"/Resources << /Font << /F1 3 0 R >> >> {page.entries} >>",
            f"<< /Length {len(content.encode('cp1252'))} >>\nstream\n{content}\nendstream",
        ]
    bodies += objects
    out = bytearray(b"%PDF-1.7\n")
    places = []
    for number, body in enumerate(bodies, start=1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("cp1252")
    start = len(out)
    out += f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010} 00000 n \n".encode() for place in places)
    out += f"trailer\n<< /Size {len(bodies) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")


def encrypted() -> bytes:
    """A PDF that only its password opens."""
    key = "<" + "5a" * 32 + ">"
    entry = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -4 >> /ID [<00> <00>]"
    return pdf(Page([Text("secret", 20, 100)]), trailer=entry)
