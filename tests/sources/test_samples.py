"""Tests of grouping members into samples."""

from mm_assets.sources.member import Member, split_member_name
from mm_assets.sources.samples import ShardMembers, metadata_member, modality_of, shard_labels


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
