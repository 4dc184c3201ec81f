"""Tests of grouping members into samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_assets.sources.member import Member, plain_name, split_member_name
from mm_assets.sources.samples import ShardMembers, id_prefixes, metadata_member, modality_of, shard_labels
from mm_assets.sources.tar import TarSource


def members_of(*names: str) -> ShardMembers:
    members = []
    for ordinal, name in enumerate(names):
        key, role, extension = split_member_name(name)
        members.append(
            Member(
                shard="s",
                member=name,
                byte_offset=512,
                byte_size=1,
                member_type="file",
                sample_key=key,
                role=role,
                extension=extension,
                ordinal=ordinal,
                skip_reason=None,
            )
        )
    return ShardMembers("s", members)


def test_members_of_one_key_are_one_sample_wherever_they_are() -> None:
    """Samples come by their first member and hold all of theirs; a second member of one name is set aside."""
    shard = members_of("a.jpg", "b.jpg", "./a.json", "b.txt", "a.jpg", "a.state.npy")
    assert [(s.key, [m.member for m in s.members]) for s in shard.samples] == [
        ("a", ["a.jpg", "./a.json", "a.state.npy"]),
        ("b", ["b.jpg", "b.txt"]),
    ]
    assert [m.ordinal for m in shard.repeated] == [4]


def test_names_are_found_as_written_and_beside() -> None:
    """A name means the member of that name, else the one beside the given member, else none."""
    shard = members_of("d/x.json", "d/x.0.png", "y.png", "./z.png")
    found = [shard.find(name, "d/x.json") for name in ("d/x.0.png", "x.0.png", "y.png", "z.png", "./y.png", "q", "")]
    assert [m and m.member for m in found] == ["d/x.0.png", "d/x.0.png", "y.png", "./z.png", "y.png", None, None]


def test_modalities() -> None:
    """Extensions count without case, the declaration goes first, and what is unknown is binary."""
    shard = members_of("a.JPG", "a.mpo", "a.Cls", "a.srt", "a.npy", "a.mid", "a.xyz", "a.rgb.bin", "a")
    kinds = [modality_of(m.extension, {"bin": "pointcloud"}) for m in shard.samples[0].members]
    assert kinds == ["image", "image", "text", "text", "array", "midi", "binary", "pointcloud", "binary"]
    metadata = metadata_member(members_of("a.boxes.json", "a.JSON", "a.json").samples[0].members)
    assert metadata is not None
    assert metadata.member == "a.JSON"


def test_labels_of_shards() -> None:
    """Shards of a group get names that no two share."""
    assert shard_labels(["/a/p-0.tar", "/a/p-1.tar.gz"]) == {"/a/p-0.tar": "p-0", "/a/p-1.tar.gz": "p-1"}
    assert list(shard_labels(["/a/x/p.tar", "/a/y/p.tar"]).values()) == ["x/p", "y/p"]
    labels = shard_labels(["/a/p.tar", "/a/p.tar.gz"])
    assert len(set(labels.values())) == 2


@pytest.mark.parametrize(
    ("name", "roles", "parts"),
    [
        ("DCIM/IMG_2023.05.01_12.30.00.JPG", [], ("DCIM/IMG_2023.05.01_12.30.00", "", "jpg")),
        ("Track 2.0 (Clean Version).mp3", [], ("Track 2.0 (Clean Version)", "", "mp3")),
        ("img.2023.05.01.rgb.jpg", ["rgb", "depth"], ("img.2023.05.01", "rgb", "jpg")),
        ("img.2023.05.01.jpg", ["rgb", "depth"], ("img.2023.05.01", "", "jpg")),
        ("img.2023.05.01.json.gz", ["rgb"], ("img.2023.05.01", "", "json")),
        ("img.1.left.rgb.png", ["rgb", "left"], ("img.1", "left.rgb", "png")),
        ("img.rgb.1.png", ["rgb"], ("img.rgb.1", "", "png")),
        ("a.b.cam7.png", ["cam*"], ("a.b", "cam7", "png")),
        ("a.b.7.png", ["#"], ("a.b", "7", "png")),
        ("a.b.7.png", ["7x"], ("a.b.7", "", "png")),
        ("rgb.rgb.png", ["rgb"], ("rgb", "rgb", "png")),
        ("v.1/x.png", [], ("v.1/x", "", "png")),
        ("a..png", [], ("a.", "", "png")),
        ("a", [], ("a", "", "")),
    ],
)
def test_with_roles_a_key_ends_before_them_or_at_the_last_dot(
    name: str, roles: list[str], parts: tuple[str, str, str]
) -> None:
    """Only listed parts directly before the extension are roles; every other dot belongs to the key."""
    assert split_member_name(name, roles) == parts


@pytest.mark.nightly_examples(10_000)
@given(
    name=st.text(st.sampled_from("aB.0/ "), min_size=1, max_size=12),
    roles=st.none() | st.lists(st.sampled_from(["a", "0", "#", "?B", "*"]), max_size=3),
)
def test_parts_of_a_name_give_the_name_back(name: str, roles: list[str] | None) -> None:
    """Key, role and extension are the whole name under either rule, and names of one key and role differ."""
    key, role, extension = split_member_name(name, roles)
    plain = plain_name(name)
    assert plain.startswith(key)
    rest = plain[len(key) :]
    assert rest.lower() in {f".{role}.{extension}".lower(), f".{extension}", ""} | ({".."} if not extension else set())


SUFFIXES = TarSource.SUFFIXES


def prefixes(declared: str, *urls: str) -> list[str]:
    return list(id_prefixes(dict.fromkeys(urls, SUFFIXES), declared).values())


@pytest.mark.parametrize(
    ("declared", "url", "prefix"),
    [
        ("/a", "/a/x/p-0.tar", "x/p-0"),
        ("/a/", "/a/x/p.2023.tar.gz", "x/p.2023"),
        ("/a/*/*.tar", "/a/x/p.tar", "x/p"),
        ("/a/p.tar", "/a/p.tar", "p"),
        ("/a/{0..3}/p.tar", "/a/3/p.tar", "3/p"),
        ("/run[1]", "/run[1]/p.tar", "run[1]/p"),
        ("s3://b/web/*.tar", "s3://b/web/p.tgz", "p"),
        ("https://h/a/p.tar?X-Amz-Signature=s", "https://h/a/p.tar?X-Amz-Signature=s", "p"),
        ("", "/a/p.tar", "p"),
    ],
)
def test_ids_in_groups_start_with_the_path_of_the_shard(declared: str, url: str, prefix: str) -> None:
    """A shard's prefix is its path below the fixed part of the declared place, alone and beside other shards."""
    assert prefixes(declared, url) == [prefix]
    folder = url.rsplit("/", 1)[0]
    assert prefixes(declared, url, f"{folder}/other.tar", f"{folder}/sub/p.tar")[0] == prefix


def test_shards_that_differ_in_their_suffix_alone_have_different_prefixes() -> None:
    """The plain one keeps its prefix when a compressed one joins it."""
    assert prefixes("/a", "/a/p.tar", "/a/p.tar.gz", "/a/p.tgz") == ["p", "p.tar.gz", "p.tgz"]
