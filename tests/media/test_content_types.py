import tarfile

import pytest

from mm_assets.media.content_types import content_type_of_name, sniff_content_type


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"", None),
        (b"plain text", None),
        (b'{"a": 1}', None),
        (b"BM is how some texts begin", None),
        (b"\xff\xfe\x00\x00", None),
        (b"GIF89a", "image/gif"),
        (b"II*\x00", "image/tiff"),
        (b"MM\x00+", "image/tiff"),
        (b"RIFF\0\0\0\0AVI ", "video/x-msvideo"),
        (b"RIFF\0\0\0\0????", None),
        (b"\0\0\0\x18ftypisom", "video/mp4"),
        (b"\0\0\0\x18ftypM4A ", "audio/mp4"),
        (b"\0\0\0\x18ftypqt  ", "video/quicktime"),
        (b"\0\0\0\x18ftypavif", "image/avif"),
        (b"\0\0\0\x08wide", "video/quicktime"),
        (b"\0\0\0\x18ftyp3gp6", "video/3gpp"),
        ((b"G" + bytes(187)) * 3, "video/mp2t"),
        ((bytes(4) + b"G" + bytes(187)) * 3, "video/mp2t"),
        (b"Give" + bytes(400), None),
        (b"FLV\x01\x05", "video/x-flv"),
        (b"\0\0\1\xba\x44", "video/mpeg"),
        (b"\x1aE\xdf\xa3\x93\x42\x82\x84webm", "video/webm"),
        (b"\x1aE\xdf\xa3\x93\x42\x82\x88matroska", "video/x-matroska"),
        (b"OggS" + bytes(24) + b"\x80theora", "video/ogg"),
        (b"OggS" + bytes(24) + b"OpusHead", "audio/ogg"),
        (b"ID3\x03", "audio/mpeg"),
        (b"\xff\xfb\x90\x44", "audio/mpeg"),
        (b"\xff\xf1\x50\x80", "audio/aac"),
        (b"MThd", "audio/midi"),
        (b"\x93NUMPY", "application/x-npy"),
        (b"%PDF-1.7", "application/pdf"),
        (b"\x1f\x8b\x08", "application/gzip"),
        (b"\x28\xb5\x2f\xfd", "application/zstd"),
        (bytes(257) + b"ustar\x0000", "application/x-tar"),
    ],
)
def test_magic_numbers(data, content_type):
    """The first bytes tell the type, and text tells none."""
    assert sniff_content_type(data) == content_type
    assert sniff_content_type(memoryview(bytearray(data))) == content_type


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("a/b.c/x.JPG", "image/jpeg"),
        ("x.mpo", "image/jpeg"),
        ("x.state.npy", "application/x-npy"),
        ("x.srt", "application/x-subrip"),
        ("x.tar.gz", "application/gzip"),
        ("folder.png/readme", None),
        ("png", None),
        ("x.unknown", None),
        ("x.", None),
        ("", None),
        ("caption.txt", "text/plain"),
        ("c:\\files\\x.wav", "audio/wav"),
    ],
)
def test_types_by_name(name, content_type):
    """The last extension tells the type, in any case, and folders do not count."""
    assert content_type_of_name(name) == content_type


def test_real_names_and_bytes_agree(shared_data):
    """The type that is found in the bytes of a member of the sample corpora is that of its name."""
    num_typed = 0
    for path in sorted(shared_data.glob("*/*.tar")):
        with tarfile.open(path) as shard:
            for member in shard:
                if member.isfile():
                    content_type = sniff_content_type(shard.extractfile(member).read(512))
                    num_typed += content_type is not None
                    assert content_type in (None, content_type_of_name(member.name)), member.name
    assert num_typed > 600
