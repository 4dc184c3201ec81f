"""What a path, a pattern, a list in braces and a presigned URL name, in local folders and on HTTP servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_assets.errors import SourceError
from mm_assets.storage.braces import MAX_EXPANDED, expand_braces
from mm_assets.storage.files import SourceFile
from mm_assets.storage.listing import Listing, ShardKind, expand_shards
from mm_assets.storage.store import Store
from mm_assets.storage.urls import filesystem, normalized_url, signed_url, split_signature, url_fault

from .web_server import serve

SIGNED = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKID%2F2026%2Fs3&X-Amz-Expires=900&X-Amz-Signature="


def put(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return folder


def listing(place: object) -> Listing:
    return expand_shards(str(place), kinds=[ShardKind("tar", (".tar", ".tar.gz"))])


def names(place: object, below: object) -> list[str]:
    return [shard.url.removeprefix(f"{below}/") for shard in listing(place).shards]


# -- patterns


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("run[1]", ["run[1]/a-0.tar", "run[1]/a-1.tar"]),
        ("run[1]/a-0.tar", ["run[1]/a-0.tar"]),
        ("run[1]/*.tar", ["run[1]/a-0.tar", "run[1]/a-1.tar"]),
        ("run[1]/a-[1].tar", ["run[1]/a-1.tar"]),
        ("run[[]1]/*.tar", ["run[1]/a-0.tar", "run[1]/a-1.tar"]),
        ("run[2]/*.tar", ["run2/b.tar"]),
        ("what?/x.tar", ["what?/x.tar"]),
        ("what?", ["what?/x.tar"]),
        ("*/x.tar", ["what?/x.tar", "{a,b}/x.tar"]),
        ("{a,b}", ["{a,b}/x.tar"]),
        ("{a,b}/*.tar", ["{a,b}/x.tar"]),
        ("run{2,[1]}/*.tar", ["run2/b.tar", "run[1]/a-0.tar", "run[1]/a-1.tar"]),
        ("run2{,/b.tar}", ["run2/b.tar"]),
        ("**/a-*.tar", ["run[1]/a-0.tar", "run[1]/a-1.tar"]),
        ("star*.tar", ["star*.tar"]),
        ("r*/[!a]*.tar", ["run2/b.tar"]),
        ("run[1]/a-[3].tar", []),
        ("nowhere/*.tar", []),
    ],
)
def test_what_exists_is_used_as_it_is(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    """A name that exists is never a pattern, nor is a folder before a pattern; what does not exist is one."""
    folder = put(tmp_path, "run[1]/a-0.tar", "run[1]/a-1.tar", "run2/b.tar", "what?/x.tar", "{a,b}/x.tar")
    put(folder, "star*.tar", "star1.tar", "run[1]/.hidden.tar", "run[1]/notes.txt")
    assert names(folder / pattern, folder) == expected


def test_missing_names_of_braces_are_reported(tmp_path: Path) -> None:
    """Braces that name a file that does not exist lose nothing else, and the file is reported."""
    put(tmp_path, "00000.tar", "00002.tar")
    found = listing(tmp_path / "{00000..00002}.tar")
    assert [Path(shard.url).name for shard in found.shards] == ["00000.tar", "00002.tar"]
    assert found.skipped == (f"{tmp_path}/00001.tar is skipped: it does not exist, though the braces name it",)
    assert found.folder == f"{tmp_path}/"
    assert len(listing(tmp_path / "{00000..99999}.tar").skipped) == 11


@pytest.mark.parametrize(
    "pattern", [f"{{0..{MAX_EXPANDED}}}.tar", "{1..2000}{1..2000}.tar", "{0..999999999999999999}", "{" * 60 + "}" * 60]
)
def test_an_absurd_list_in_braces_is_refused(tmp_path: Path, pattern: str) -> None:
    """Braces that stand for too many names, or are nested too deeply, are an error before any of them is made."""
    with pytest.raises(SourceError, match=r"has braces that stand for|braces inside each other"):
        listing(tmp_path / pattern)


Options = st.deferred(lambda: st.one_of(texts, ranges, groups))
texts = st.text("ab-.", min_size=1, max_size=3).map(lambda text: (text, [text]))
ranges = st.tuples(st.integers(-20, 120), st.integers(-20, 120), st.integers(1, 30), st.booleans()).map(
    lambda drawn: numbers(*drawn)
)
sequences = st.lists(Options, min_size=1, max_size=3).map(
    lambda parts: ("".join(text for text, _ in parts), joined([options for _, options in parts]))
)
groups = st.lists(sequences, min_size=2, max_size=3).map(
    lambda parts: ("{" + ",".join(text for text, _ in parts) + "}", [one for _, options in parts for one in options])
)


def numbers(first: int, last: int, step: int, is_padded: bool) -> tuple[str, list[str]]:
    """A range as written, and its numbers."""
    width = 5 if is_padded else 0
    ends = f"{first:0{width}d}", f"{last:0{width}d}"
    values = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return f"{{{ends[0]}..{ends[1]}..{step}}}", [f"{value:0{width}d}" for value in values]


def joined(parts: list[list[str]]) -> list[str]:
    """Every combination, the last part changing fastest."""
    texts = [""]
    for options in parts:
        texts = [head + tail for head in texts for tail in options][:5000]
    return texts


@pytest.mark.nightly_examples(10_000)
@given(sequences)
def test_braces_stand_for_their_combinations(drawn: tuple[str, list[str]]) -> None:
    """Nested lists and ranges, in either direction, padded or with a step, give each combination once and in order."""
    text, expected = drawn
    if len(expected) < 5000:
        assert expand_braces(text) == list(dict.fromkeys(expected))


@pytest.mark.nightly_examples(10_000)
@given(st.text("{},.a0", max_size=20))
def test_any_text_with_braces_can_be_expanded(text: str) -> None:
    """Whatever braces a text has, it stands for some names; without a pair of them, for itself."""
    expanded = expand_braces(text)
    assert expanded
    if "{" not in text.partition("}")[0] and "{" not in text.rpartition("}")[0]:
        assert expanded == [text]


# -- links


def test_links_are_followed_once(tmp_path: Path) -> None:
    """Links to files and folders are followed, a loop ends, and no folder is listed twice."""
    put(tmp_path, "in/real/1.tar", "disk/2.tar", "disk/deep/3.tar", "blob")
    for link, target in (
        ("a-real", "real"),
        ("disk", "../disk"),
        ("again", "../disk"),
        ("loop", "../in"),
        ("up", ".."),
    ):
        (tmp_path / "in" / link).symlink_to(target)
    (tmp_path / "in" / "4.tar").symlink_to("../blob")
    (tmp_path / "in" / "real" / "self").symlink_to("self")
    found = names(tmp_path / "in", tmp_path / "in")
    assert found == ["4.tar", "again/2.tar", "again/deep/3.tar", "real/1.tar"]
    assert names(tmp_path / "in" / "*" / "2.tar", tmp_path / "in") == ["again/2.tar"]
    assert names(tmp_path / "in" / "disk" / "*.tar", tmp_path / "in") == ["disk/2.tar"]
    (tmp_path / "in" / "0-new").symlink_to("real")  # which does not give the files of `real` other paths
    assert names(tmp_path / "in", tmp_path / "in") == found


@pytest.mark.parametrize("pattern", ["", "/*.tar", "/{a,b}.tar", "/b.tar", "/**/*.tar"])
def test_a_dangling_link_is_reported(tmp_path: Path, pattern: str) -> None:
    """A link that leads nowhere, or to itself, is reported by name, and keeps no other file from being listed."""
    put(tmp_path, "a.tar", ".hidden")
    (tmp_path / "b.tar").symlink_to("gone/x.tar")
    (tmp_path / ".c.tar").symlink_to("gone")
    found = listing(f"{tmp_path}{pattern}")
    assert found.skipped == (
        f"{tmp_path}/b.tar is skipped: it is a link to gone/x.tar, which is missing or may not be read",
    )
    assert len(found.shards) == (0 if pattern == "/b.tar" else 1)


def test_a_folder_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    """A folder without permissions is reported, and the others are listed."""
    put(tmp_path, "a/1.tar", "b/2.tar")
    (tmp_path / "a").chmod(0)
    if os.access(tmp_path / "a", os.R_OK):
        pytest.skip("this user may read every folder")
    found = listing(tmp_path)
    (tmp_path / "a").chmod(0o700)
    assert [shard.url for shard in found.shards] == [f"{tmp_path}/b/2.tar"]
    assert "a/ is skipped: it cannot be listed: Permission denied" in found.skipped[0]


def test_a_name_that_is_not_utf8_is_reported(tmp_path: Path) -> None:
    """A file whose name no table could hold is reported in printable form, and the others are listed."""
    put(tmp_path, "a.tar")
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.tar")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system has no such names")
    found = listing(tmp_path)
    assert [Path(shard.url).name for shard in found.shards] == ["a.tar"]
    assert found.skipped == (f"{tmp_path}/\\xff.tar is skipped: it has a name that is not UTF-8: rename it",)


# -- spellings


def test_a_place_has_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a local folder or pattern is written, it is normalized to the same absolute path, and stays that."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    spellings = [
        "x",
        "./x",
        "x/",
        "x//",
        "a/../x",
        "~/x",
        "x/.",
        f"{tmp_path}/x",
        f"/{tmp_path}/x/",
        f"file://{tmp_path}/x",
    ]
    spellings += [f"file:{tmp_path}/x/", f"file://localhost{tmp_path}/x", f"local://{tmp_path}/./x"]
    for tail in ("", "/*.tar", "/{00..09}.tar", "/{a/1,b/2}.tar"):
        assert {normalized_url(spelling.rstrip("/") + tail) for spelling in spellings} == {f"{tmp_path}/x{tail}"}
        assert normalized_url(f"{tmp_path}/x{tail}") == f"{tmp_path}/x{tail}"
    assert {normalized_url(spelling, tmp_path / "other") for spelling in spellings[:5]} == {f"{tmp_path}/other/x"}
    assert normalized_url("{a,b}.tar") == f"{tmp_path}/{{a,b}}.tar"
    assert normalized_url("s3://bucket/x/") == normalized_url("s3://bucket/x") == "s3://bucket/x"


@pytest.mark.parametrize(
    "text",
    ["pipe:cat a.tar", "-", "a.tar::b.tar", "in/a.tar::in/b.tar", "/in/a.tar::/in/b.tar", "http://a/b::http://a/c"],
)
def test_what_is_no_place_is_refused_by_name(text: str) -> None:
    """A command, standard input and a list with :: are refused by their form, and the message says what to write."""
    assert "name the file" in (url_fault(text) or "")


def test_a_name_may_have_two_colons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or folder whose name has :: is read like any other, however its path is written."""
    folder = put(tmp_path, "a::b/t::0.tar")
    monkeypatch.chdir(tmp_path)
    for place in ("a::b", "a::b/*.tar", f"{folder}/a::b/t::0.tar"):
        assert url_fault(place) is None
        (shard,) = listing(normalized_url(place)).shards
        with SourceFile(shard.url) as file:
            assert file.read(0, 4) == b"a::b"
    _, path = filesystem("s3://bucket/a::b.tar", None)
    assert path == "bucket/a::b.tar"


# -- HTTP


def test_a_folder_of_a_server(tmp_path: Path) -> None:
    """A page of links is a folder: its files have sizes, and links out of it or for sorting are ignored."""
    put(tmp_path, "data/a-0.tar", "data/sub/b 1.tar", "data/readme.txt", "data/c#1.tar", "other.tar", "data/.x.tar")
    links = ("/data/", "/", "../", "?C=N;O=D", "./", "a-0.tar?download=1", "https://example.org/z.tar", "/other.tar")
    with serve(tmp_path, links=links) as web:
        expected = ["a-0.tar", "c%231.tar", "sub/b%201.tar"]
        for place in ("data/", "data"):
            found = listing(f"{web.url}/{place}")
            assert [shard.url for shard in found.shards] == [f"{web.url}/data/{name}" for name in expected]
        assert [shard.size for shard in found.shards] == [12, 12, 16]
        assert names(f"{web.url}/data/*.tar", f"{web.url}/data") == expected[:2]
        assert names(f"{web.url}/data/*/b *.tar", f"{web.url}/data") == expected[2:]
        assert names(f"{web.url}/data/**/b%20*.tar", f"{web.url}/data") == expected[2:]
        assert Store(f"{web.url}/data").sizes("").keys() == {"a-0.tar", "c#1.tar", "readme.txt"}
        assert Store(f"{web.url}/data").read_bytes("c#1.tar") == b"data/c#1.tar"


def test_braces_need_no_listing(tmp_path: Path) -> None:
    """Files of a server that lists no folder are named by braces; one that is missing is reported."""
    put(tmp_path, *(f"d/{number:05d}.tar" for number in range(5)))
    with serve(tmp_path, lacks=("pages", "head")) as web:
        found = listing(f"{web.url}/d/{{00000..00005}}.tar")
        assert [shard.url[-9:] for shard in found.shards] == [f"{number:05d}.tar" for number in range(5)]
        assert ["00005.tar is skipped: it does not exist" in line for line in found.skipped] == [True]
        with pytest.raises(SourceError, match="cannot be listed"):
            listing(f"{web.url}/d/*.tar")


def test_a_subfolder_that_a_server_refuses_is_reported(tmp_path: Path) -> None:
    """A folder that may not be listed is reported, and the others are listed."""
    put(tmp_path, "d/a.tar", "d/secret/b.tar", "d/c/d.tar")
    with serve(tmp_path, refused=("/d/secret/",)) as web:
        found = listing(f"{web.url}/d/")
        assert [shard.url.rpartition("/")[2] for shard in found.shards] == ["a.tar", "d.tar"]
        assert ["/d/secret/ is skipped: it cannot be listed" in line for line in found.skipped] == [True]


@pytest.mark.parametrize(
    ("lacks", "message"),
    [("length", "does not report the file's size, .* Content-Length"), ("ranges", "ignores ranges"), ("head", "")],
)
def test_what_a_server_lacks(tmp_path: Path, lacks: str, message: str) -> None:
    """A server without HEAD is read; one without sizes or without ranges is an error that says so."""
    put(tmp_path, "a.tar")
    with serve(tmp_path, lacks=(lacks,)) as web:
        if message:
            with pytest.raises(SourceError, match=message):
                SourceFile(listing(f"{web.url}/a.tar").shards[0].url).read(0, 2)
        else:
            assert SourceFile(listing(f"{web.url}/a.tar").shards[0].url).read(0, 2) == b"a."


def test_a_server_that_is_down_is_an_error(tmp_path: Path) -> None:
    """A server that does not answer is an error for a file, a pattern and braces, and not a place without shards."""
    for name in ("a.tar", "*.tar", "{a,b}.tar"):
        with pytest.raises(SourceError, match="Cannot connect"):
            listing(f"http://127.0.0.1:9/{name}")


# -- presigned URLs


def test_a_presigned_url_is_one_shard(tmp_path: Path) -> None:
    """Its `?` matches nothing; the shard has the URL without the signature: signed again, it is the same shard."""
    put(tmp_path, "block 1/part_00008.tar")
    with serve(tmp_path, signature="X-Amz-Signature") as web:
        place = f"{web.url}/block%201/part_00008.tar"
        found = [listing(f"{place}?{SIGNED}{signature}").shards for signature in ("0123", "4567")]
        assert found[0] == found[1]
        assert [shard.url for shard in found[0]] == [place]
        assert expand_shards(place, {"signature": f"{SIGNED}89ab"}, kinds=[]).shards == found[0]
        with SourceFile(f"{place}?{SIGNED}0123") as file:
            assert (file.url, file.read(0, 5)) == (place, b"block")
        with pytest.raises(SourceError, match=r"refuses access \(HTTP 403\).*sign it again"):
            listing(place)
        found_both = expand_shards(f"{web.url}/block%201/part_0000{{8,9}}.tar", {"signature": f"{SIGNED}0"}, kinds=[])
        assert len(found_both.shards) == len(found_both.skipped) == 1


@pytest.mark.parametrize(
    ("url", "place"),
    [
        (f"https://b.s3.amazonaws.com/a%20b.tar?{SIGNED}0", "https://b.s3.amazonaws.com/a%20b.tar"),
        (f"https://h/a.tar?versionId=7&{SIGNED}0&x-id=GetObject", "https://h/a.tar?versionId=7&x-id=GetObject"),
        ("https://h/a.tar?AWSAccessKeyId=A&Signature=b%3D&Expires=1", "https://h/a.tar"),
        (
            "https://storage.googleapis.com/b/a.tar?X-Goog-Date=1&X-Goog-Signature=f",
            "https://storage.googleapis.com/b/a.tar",
        ),
        (
            "https://x.blob.core.windows.net/c/a.tar?sv=2022&st=a&se=b&sr=b&sp=r&sig=c%3D",
            "https://x.blob.core.windows.net/c/a.tar",
        ),
        ("https://cdn/a.tar?Expires=1&Policy=e&Signature=s&Key-Pair-Id=k", "https://cdn/a.tar"),
        ("https://raw.example.org/a.tar?token=GHS", "https://raw.example.org/a.tar"),
        ("https://h/get?key=a.tar&expires=1", "https://h/get?key=a.tar&expires=1"),
        ("https://h/a.tar?download=1&se=b", "https://h/a.tar?download=1&se=b"),
        ("s3://bucket/a?token=1.tar", "s3://bucket/a?token=1.tar"),
        ("/local/a?sig=1.tar", "/local/a?sig=1.tar"),
    ],
)
def test_what_signs_a_url(url: str, place: str) -> None:
    """The signatures of S3, Google, Azure and CloudFront are split off; what names the object or its version stays."""
    unsigned, signature = split_signature(url)
    assert unsigned == place
    assert sorted(signed_url(unsigned, signature).split("?", 1)[-1].split("&")) == sorted(
        url.split("?", 1)[-1].split("&")
    )
    assert split_signature(signed_url(unsigned, signature)) == (unsigned, signature)
