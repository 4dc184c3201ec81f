"""MIME types of media, from their first bytes and from their names.

The tables do not depend on the machine's MIME database: the same bytes and names give the same answer everywhere. No
bytes make these functions raise.
"""

from __future__ import annotations

import struct

__all__ = ["OWN_ZIPS", "Buffer", "content_type_of_name", "sniff_content_type"]

Buffer = bytes | bytearray | memoryview  # as in `formats.records`: neither package imports the other

_U32_LE = struct.Struct("<I")

_MAGIC: tuple[tuple[int, bytes, str], ...] = (  # (offset, bytes, MIME type); the first match applies
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"GIF87a", "image/gif"),
    (0, b"GIF89a", "image/gif"),
    (0, b"II*\x00", "image/tiff"),
    (0, b"MM\x00*", "image/tiff"),
    (0, b"II+\x00", "image/tiff"),
    (0, b"MM\x00+", "image/tiff"),
    (0, b"\x00\x00\x00\x0cjP  \r\n\x87\n", "image/jp2"),
    (0, b"\xff\x4f\xff\x51", "image/j2c"),
    (0, b"\x00\x00\x00\x0cJXL \r\n\x87\n", "image/jxl"),
    (0, b"\xff\x0a", "image/jxl"),
    (0, b"fLaC", "audio/flac"),
    (0, b"MThd", "audio/midi"),
    (0, b"#!AMR", "audio/amr"),
    (0, b".snd", "audio/basic"),
    (0, b"dns.", "audio/basic"),
    (0, b"caff\x00\x01", "audio/x-caf"),
    (0, b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb", "audio/x-w64"),
    (0, b"wvpk", "audio/x-wavpack"),
    (0, b"FLV\x01", "video/x-flv"),
    (0, b"\x00\x00\x01\xba", "video/mpeg"),
    (0, b"\x00\x00\x01\xb3", "video/mpeg"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11", "video/x-ms-asf"),
    (0, b"\x93NUMPY", "application/x-npy"),
    (0, b"%PDF-", "application/pdf"),
    (0, b"\x1f\x8b", "application/gzip"),
    (0, b"\x28\xb5\x2f\xfd", "application/zstd"),
    (0, b"BZh", "application/x-bzip2"),
    (0, b"\xfd7zXZ\x00", "application/x-xz"),
    (0, b"PK\x03\x04", "application/zip"),
    (0, b"PK\x05\x06", "application/zip"),
    (0, b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (0, b"\x89HDF\r\n\x1a\n", "application/x-hdf5"),
    (0, b"PAR1", "application/vnd.apache.parquet"),
    (0, b"ARROW1", "application/vnd.apache.arrow.file"),
    (0, b"SQLite format 3\x00", "application/vnd.sqlite3"),
    (257, b"ustar", "application/x-tar"),
)
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {  # by major brand of an ISO base media file; any other is video/mp4
    b"qt  ": "video/quicktime",
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"heim": "image/heic",
    b"heis": "image/heic",
    b"hevc": "image/heic",
    b"hevx": "image/heic",
    b"mif1": "image/heif",
    b"msf1": "image/heif",
    **dict.fromkeys((b"3gp4", b"3gp5", b"3gp6", b"3gp7", b"3g2a", b"3g2b"), "video/3gpp"),
}
_QUICKTIME_ATOMS = (b"moov", b"mdat", b"wide", b"skip")  # QuickTime files from before 2001 have no ftyp
_TS_PACKETS = ((0, 188), (4, 192))  # first sync byte and distance of the next; Blu-ray discs have times between
_PNM = {  # by the second byte; text begins so too, but not with a number after it
    code: f"image/x-portable-{kind}"
    for kind, codes in (("bitmap", b"14"), ("graymap", b"25"), ("pixmap", b"36"))
    for code in codes
}
_BMP_HEADER_SIZES = (12, 40, 52, 56, 64, 108, 124)

_NAMES: dict[str, str] = {
    extension: content_type
    for content_type, extensions in {
        "image/jpeg": "jpg jpeg jpe jfif mpo",
        "image/png": "png apng",
        "image/gif": "gif",
        "image/webp": "webp",
        "image/tiff": "tif tiff",
        "image/bmp": "bmp dib",
        "image/avif": "avif",
        "image/heic": "heic",
        "image/heif": "heif hif",
        "image/jxl": "jxl",
        "image/jp2": "jp2 jpx jpf",
        "image/j2c": "j2k j2c jpc",
        "image/x-portable-anymap": "pnm",
        "image/x-portable-bitmap": "pbm",
        "image/x-portable-graymap": "pgm",
        "image/x-portable-pixmap": "ppm",
        "image/x-tga": "tga",
        "image/svg+xml": "svg",
        "image/x-icon": "ico",
        "audio/wav": "wav wave rf64",
        "audio/flac": "flac",
        "audio/ogg": "ogg oga opus spx",
        "audio/mpeg": "mp3 mp2 mpga",
        "audio/mp4": "m4a m4b",
        "audio/aac": "aac",
        "audio/ac3": "ac3",
        "audio/eac3": "eac3 ec3",
        "audio/aiff": "aif aiff aifc",
        "audio/basic": "au snd",
        "audio/x-caf": "caf",
        "audio/x-w64": "w64",
        "audio/x-wavpack": "wv",
        "audio/x-matroska": "mka",
        "audio/webm": "weba",
        "audio/x-ms-wma": "wma",
        "audio/amr": "amr",
        "audio/midi": "mid midi",
        "video/mp4": "mp4 m4v",
        "video/quicktime": "mov qt",
        "video/webm": "webm",
        "video/x-matroska": "mkv",
        "video/x-msvideo": "avi",
        "video/ogg": "ogv",
        "video/mpeg": "mpg mpeg vob",
        "video/mp2t": "ts mts m2ts",
        "video/3gpp": "3gp 3g2",
        "video/x-flv": "flv",
        "video/x-ms-asf": "asf wmv",
        "text/plain": "txt text caption cls log",
        "text/csv": "csv",
        "text/tab-separated-values": "tsv",
        "text/html": "html htm",
        "text/markdown": "md",
        "text/vtt": "vtt",
        "application/x-subrip": "srt",
        "application/json": "json",
        "application/jsonl": "jsonl ndjson",
        "application/yaml": "yaml yml",
        "application/xml": "xml",
        "application/vnd.recordare.musicxml+xml": "musicxml",
        "application/pdf": "pdf",
        "application/x-npy": "npy",
        "application/x-npz": "npz",
        "application/gzip": "gz tgz",
        "application/zstd": "zst tzst",
        "application/x-bzip2": "bz2",
        "application/x-xz": "xz",
        "application/zip": "zip",
        "application/x-tar": "tar",
        "application/x-hdf5": "h5 hdf5",
        "application/vnd.apache.parquet": "parquet",
        "application/vnd.apache.arrow.file": "arrow",
    }.items()
    for extension in extensions.split()
}

_EXTENSIONS = {content_type: extension for extension, content_type in reversed(_NAMES.items())}  # the first of each

OWN_ZIPS: frozenset[str] = frozenset({"application/x-npz"})
"""Types whose bytes are those of a zip archive, and whose names are more telling."""


def content_type_of_name(name: str) -> str | None:
    """The MIME type of a file's last extension, in any case; None for an unknown extension or without one."""
    _, dot, extension = name.replace("\\", "/").rsplit("/", 1)[-1].rpartition(".")
    return _NAMES.get(extension.lower()) if dot else None


def extension_of_content_type(content_type: str) -> str | None:
    """The usual extension of a MIME type, in lower case without the dot; None for an unknown type."""
    return _EXTENSIONS.get(content_type)


def sniff_content_type(data: Buffer) -> str | None:
    """The MIME type of the first bytes, from their magic number; None without one, as for text.

    The first 512 bytes are enough.
    """
    head = bytes(memoryview(data).cast("B")[:512])
    for offset, magic, content_type in _MAGIC:
        if head.startswith(magic, offset):
            return content_type
    if head[:4] in (b"RIFF", b"RF64"):
        return _RIFF.get(head[8:12])
    if head[4:8] == b"ftyp" and len(head) >= 12:
        return _BRANDS.get(head[8:12], "video/mp4")
    if head[4:8] in _QUICKTIME_ATOMS:
        return "video/quicktime"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "video/webm" if b"\x42\x82\x84webm" in head[:64] else "video/x-matroska"
    if head.startswith(b"OggS"):
        return "video/ogg" if b"\x80theora" in head[:64] else "audio/ogg"
    if head.startswith(b"FORM") and head[8:12] in (b"AIFF", b"AIFC"):
        return "audio/aiff"
    if head.startswith(b"BM") and len(head) >= 18 and _U32_LE.unpack_from(head, 14)[0] in _BMP_HEADER_SIZES:
        return "image/bmp"
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace() and head[3:4] in b"#0123456789":
        return _PNM.get(head[1]) if len(head) >= 4 else None
    if head.startswith(b"\0\0\1\0") and len(head) >= 22 and _is_ico(head):
        return "image/x-icon"
    if head.startswith(b"ID3"):
        return "audio/mpeg"
    if head.startswith(b"\x0bw") and len(head) > 5:
        return "audio/ac3" if head[5] >> 3 <= 10 else "audio/eac3"
    if any(len(head) > at + 2 * step and {head[at + n * step] for n in range(3)} == {0x47} for at, step in _TS_PACKETS):
        return "video/mp2t"
    return _sniff_mpeg_audio(head)


def _is_ico(head: bytes) -> bool:
    """Whether the first entry of a directory of icons is a possible one."""
    count, reserved = head[4] | head[5] << 8, head[9]
    offset = _U32_LE.unpack_from(head, 18)[0]
    return 1 <= count <= 1024 and reserved == 0 and offset >= 6 + 16 * count


def _sniff_mpeg_audio(head: bytes) -> str | None:
    """MP3 and AAC have only a sync word: all their fixed fields must be valid too."""
    if len(head) < 4 or head[0] != 0xFF:
        return None
    if head[1] & 0xF6 == 0xF0:  # ADTS: layer 0
        return "audio/aac" if (head[2] >> 2) & 15 < 13 else None
    version, layer, bitrate, rate = (head[1] >> 3) & 3, (head[1] >> 1) & 3, head[2] >> 4, (head[2] >> 2) & 3
    is_frame = head[1] & 0xE0 == 0xE0 and version != 1 and layer != 0 and bitrate not in (0, 15) and rate != 3
    return "audio/mpeg" if is_frame else None
