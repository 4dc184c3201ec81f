"""Tests of grouping members, of references, and of column inference."""

import pytest

from mm_assets.errors import SourceError
from mm_assets.rows.schema import MemberRules
from mm_assets.rows.source_ref import is_allowed_reference
from mm_assets.rows.user_columns import UNFIT, columns_of, converter
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
    shard = members_of("a.JPG", "a.Cls", "a.srt", "a.npy", "a.mid", "a.xyz", "a.rgb.bin", "a")
    kinds = [modality_of(m.extension, {"bin": "pointcloud"}) for m in shard.samples[0].members]
    assert kinds == ["image", "text", "text", "array", "midi", "binary", "pointcloud", "binary"]
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
    ("token", "allowed"),
    [
        ("https://a.org/x.jpg", True),
        ("https://a.org/deep/x.jpg?y=1", True),
        ("https://a.org.evil.net/x.jpg", False),
        ("https://a.org@evil.net/x.jpg", False),
        ("https://a.org/../x.jpg", False),
        ("https://a.org/%2e%2E/x.jpg", False),
        ("https://a.org/..%2fx.jpg", False),
        ("https://a.org/x::file:///etc/passwd", False),
        ("/data/ok/x.jpg", True),
        ("/data/ok/../../etc/passwd", False),
        ("/data/ok/..", False),
        ("/data/okay/x.jpg", False),
        ("/data/ok/a..b.jpg", True),
        ("/data/ok/x\n.jpg", False),
        ("data/ok/x.jpg", False),
        ("", False),
    ],
)
def test_references(token: str, allowed: bool) -> None:
    """Only what is below an allowed prefix, in a plain spelling, may be followed."""
    assert is_allowed_reference(token, ("https://a.org", "/data/ok/", "")) is allowed


def test_columns_are_inferred() -> None:
    """Types widen as the design says; order is that of first appearance; reserved names are set apart."""
    objects = [
        {"b": True, "i": 1, "f": 1, "s": "x", "li": [1], "le": [], "m": 1, "o": {"a": 1}, "modality": "q", "n": None},
        {"new": "y", "i": None, "f": 0.5, "li": [2.5, None], "le": ["t"], "m": "text", "big": 2**70, "lj": [[1]]},
        {"user_modality": 3, "texts": ["t"], "images": [None], "": 1, "bad\x01": 1, "e": []},
    ]
    columns = columns_of(objects, MemberRules(), shown="s")
    assert {c.name: c.type for c in columns} == {
        "b": "bool",
        "i": "int64",
        "f": "double",
        "s": "string",
        "li": "list<double>",
        "le": "list<string>",
        "m": "json",
        "o": "json",
        "user_modality": "string",
        "n": "json",
        "new": "string",
        "big": "json",
        "lj": "json",
        "user_user_modality": "int64",
        "e": "json",
    }
    assert [c.name for c in columns][:3] == ["b", "i", "f"]


def test_columns_that_are_asked_for() -> None:
    """Exactly the named keys are columns; one that is reserved or nowhere is refused."""
    objects = [{"a": 1, "b": 2}, {"b": 3}]
    (column,) = columns_of(objects, MemberRules(user_columns=("a",)), shown="s")
    assert (column.name, column.type, column.required) == ("a", "int64", True)
    assert columns_of(objects, MemberRules(user_columns=()), shown="s") == ()
    with pytest.raises(SourceError, match="'zz'"):
        columns_of(objects, MemberRules(user_columns=("a", "zz")), shown="s")
    with pytest.raises(ValueError, match="reserved"):
        MemberRules(user_columns=("modality",))


def test_keys_that_are_data_do_not_become_columns_without_end() -> None:
    """The number of columns is bounded whatever the JSON holds."""
    assert len(columns_of([{str(k): k for k in range(5000)}], MemberRules(), shown="s")) == 512


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("bool", 1, UNFIT),
        ("int64", True, UNFIT),
        ("int64", 2**63, UNFIT),
        ("int64", 1.0, UNFIT),
        ("double", 3, 3.0),
        ("double", 10**400, UNFIT),
        ("string", 3, UNFIT),
        ("json", {"a": [1, "é"]}, '{"a":[1,"é"]}'),
        ("list<int64>", [1, None], [1, None]),
        ("list<int64>", [1, "x"], UNFIT),
        ("list<string>", "x", UNFIT),
    ],
)
def test_values_fit_or_not(kind: str, value: object, expected: object) -> None:
    """A value becomes its column's type without loss, or is reported not to fit."""
    assert converter(kind)(value) == expected
