"""What a file is by its first bytes, where it is not the container that its name or its place promises.

A shard that a download, a checkout or a copy left as something else is named, with what to do about it. Only the head
is looked at, and only after the formats that are read have refused it: no bytes make these functions raise.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from mm_assets.errors import ShardError
from mm_assets.media.content_types import sniff_content_type

__all__ = ["HEAD_BYTES", "ForeignFile", "foreign_file", "format_error"]

HEAD_BYTES = 512  # of a file's start, by which its format is detected: a tar header

_SHOWN = 40  # characters of a text that a message repeats
_PACK_AGAIN = "unpack it and write its files as a tar"
_AS_ZIP = "leave out `source`, or set it to zip"
_DOWNLOAD = "download the shard again"


class ForeignFile(NamedTuple):
    """A file that is not a shard.

    Attributes:
        kind: short name: "html", "json", "text" and so on.
        what: what it is, with its article.
        remedy: what to do.
    """

    kind: str
    what: str
    remedy: str

    def as_not(self, expected: str) -> str:
        """A clause for an error: what the file is, that it is not `expected`, and what to do."""
        return f"is {self.what}, not {expected}: {self.remedy}"


_MAGIC: tuple[tuple[bytes, ForeignFile], ...] = (
    (b"version https://git-lfs.github.com/spec/", ForeignFile("git_lfs", "a Git LFS pointer", "run `git lfs pull`")),
    (b"/annex/objects/", ForeignFile("git_annex", "a git-annex pointer", "run `git annex get`")),
    *(
        (magic, ForeignFile("cpio", "a cpio archive", _PACK_AGAIN))
        for magic in (b"070707", b"070701", b"070702", b"\xc7\x71", b"\x71\xc7")
    ),
    (b"PK\x03\x04", ForeignFile("zip", "a zip archive", _AS_ZIP)),
    (b"PK\x05\x06", ForeignFile("zip", "a zip archive without files", _AS_ZIP)),
    (b"Rar!\x1a\x07", ForeignFile("rar", "a RAR archive", _PACK_AGAIN)),
    (b"7z\xbc\xaf\x27\x1c", ForeignFile("7z", "a 7z archive", _PACK_AGAIN)),
    (b"!<arch>\n", ForeignFile("ar", "an ar archive", _PACK_AGAIN)),
    *(
        (magic, ForeignFile("compressed", f"compressed with {name}", "compress it with gzip, zstd, bzip2 or xz"))
        for magic, name in ((b"\x04\x22\x4d\x18", "LZ4"), (b"LZIP", "lzip"), (b"\x1f\x9d", "compress"))
    ),
    (b"PAR1", ForeignFile("parquet", "a Parquet file", "name it .parquet if it is a list of files")),
    (b"%PDF-", ForeignFile("pdf", "a PDF file", "put it into a tar, as a member of a sample")),
)
_ANNEX_LINK = re.compile(rb"(?:\.\./)*\.git/annex/objects/")
_HTML = re.compile(rb"<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE)
_XML_ERROR = re.compile(rb"<(?:\w+:)?Error\b")
_XML_CODE = re.compile(rb"<Code>([A-Za-z0-9_.-]{1,64})</Code>")
_JSON = re.compile(rb"\{\s*[\"}]|\[\s*[\"\[{\]\d-]")
_NAME_BYTES = 100  # of a tar header, which begins with the member's name
_NOT_TEXT = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def foreign_file(head: bytes) -> ForeignFile | None:
    """What a file is that starts with `head` and is neither a tar nor a compressed one; None if nothing is known.

    Args:
        head: its first bytes, `HEAD_BYTES` of them if it has as many.
    """
    if head[257:262] == b"ustar":
        return None  # a tar whose first header is damaged
    if not head:
        return ForeignFile("empty", "empty (0 bytes)", f"{_DOWNLOAD}, or remove the file")
    for magic, found in _MAGIC:
        if head.startswith(magic):
            return found
    text = _as_text(head)
    if text is not None:
        return _text_file(head, text)
    content_type = sniff_content_type(head)
    if content_type is not None and content_type.partition("/")[0] in ("image", "audio", "video"):
        return ForeignFile("media", f"one file of {content_type}", "put it into a tar, or name it in a list of files")
    return None


def format_error(url: str, head: bytes, expected: str) -> ShardError:
    """Returns the error of a file that starts with `head`, and so is not `expected`, a format with its article."""
    foreign = foreign_file(head)
    detail = f"is not {expected}" if foreign is None else foreign.as_not(expected)
    return ShardError(url, detail, byte_offset=0)


def _text_file(head: bytes, text: str) -> ForeignFile | None:
    stripped = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if _ANNEX_LINK.match(stripped):
        return ForeignFile("git_annex", "a git-annex pointer", "run `git annex get`")
    if _HTML.search(stripped[:256]):
        remedy = f"the server answered with a page (a login, an error, a listing): {_DOWNLOAD} from its direct URL"
        return ForeignFile("html", "an HTML page", remedy)
    if _XML_ERROR.search(stripped) and stripped.startswith(b"<"):
        code = _XML_CODE.search(stripped)
        named = f" ({code[1].decode()})" if code else ""
        remedy = f"check the object's name and the rights to read it, then {_DOWNLOAD}"
        return ForeignFile("xml_error", f"an error document of an object store{named}", remedy)
    if stripped.startswith(b"<?xml"):
        return ForeignFile("xml", "an XML document", _DOWNLOAD)
    if _JSON.match(stripped):
        return ForeignFile("json", "JSON text", "name it .jsonl if it is a list of files")
    if b"\n" not in head and len(head) <= _NAME_BYTES:
        return None  # it may be the name in the first header of a truncated tar
    shown = " ".join(text[: 2 * _SHOWN].split())[:_SHOWN]
    return ForeignFile("text", f"a text file ({shown!a})", "move it out of the folder of shards, or name the shards")


def _as_text(head: bytes) -> str | None:
    """The head as text, or None if it is not text in UTF-8."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if len(head) - error.start > 3 or error.reason != "unexpected end of data":
            return None
        text = head[: error.start].decode()  # the head ends inside a character
    return None if _NOT_TEXT.search(text) or not text.strip() else text
