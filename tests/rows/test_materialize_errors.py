"""What is wrong with a row is an error of that row, what is wrong with the storage is not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mm_assets.errors import ConfigError, CredentialsError, ShardReadError, SourceError
from mm_assets.rows.materialize import MaterializeStream
from mm_assets.rows.parquet import ParquetSink
from mm_assets.storage.files import SourceFile

from .materialize import SCHEMA, Opener, batch_of, content, make_tar, make_tiff, ref_of, row, run


def test_other_content_is_not_a_frame(tmp_path: Path, opener: Opener) -> None:
    """What is not a TIFF is returned unchanged, whatever frame is asked for."""
    spans = make_tar(tmp_path / "a.tar", {"x.jpg": content(1, 70), "y.jpg": b"GIF"})
    rows = [row("x", k, ref_of(tmp_path / "a.tar", n, spans[n], k)) for k, n in enumerate(("x.jpg", "y.jpg", "x.jpg"))]
    found, _, stream = run(rows, opener)
    assert [r["binary_content"] for r in found] == [content(1, 70), b"GIF", content(1, 70)]
    assert stream.counts["frames"] == 0


def test_a_missing_frame_is_an_error_of_its_row(tmp_path: Path, opener: Opener) -> None:
    """A frame that the TIFF does not have, or a TIFF that is damaged, costs only the rows that ask for it."""
    tiff = make_tiff(2)
    spans = make_tar(tmp_path / "a.tar", {"d.tiff": tiff, "e.tiff": tiff[:9]})
    rows = [row("d", k, ref_of(tmp_path / "a.tar", "d.tiff", spans["d.tiff"], k)) for k in range(3)]
    rows.append(row("e", 0, ref_of(tmp_path / "a.tar", "e.tiff", spans["e.tiff"], 0)))
    found, _, stream = run(rows, opener)
    assert [r["binary_content"] is None for r in found] == [False, False, True, True]
    shard = tmp_path / "a.tar"
    assert found[2]["materialize_error"] == (
        f"{shard}, member 'd.tiff', frame 2: frame 2 was asked for, the file has 2"
    )
    assert "member 'e.tiff', frame 0: the directory of frame 0 is truncated" in found[3]["materialize_error"]
    assert stream.counts["errors"] == 2


# -- errors
@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (None, "source_ref: is missing or has no path"),
        ("", "source_ref: is missing or has no path"),
        ("no json", "source_ref: is not JSON"),
        ("[1]", "source_ref: is a JSON list"),
        ('{"path": 7}', "source_ref: path is int"),
        ('{"path": "SHARD", "byte_offset": -1, "byte_size": 5}', "source_ref: byte_offset is out of range"),
        ('{"path": "SHARD", "byte_offset": 5, "byte_size": -5}', "source_ref: byte_size is out of range"),
        ('{"path": "SHARD", "byte_offset": 5}', "byte_offset is given without byte_size"),
        (
            '{"path": "SHARD", "byte_offset": 5, "byte_size": 9223372036854775807}',
            "source_ref: byte_offset and byte_size",
        ),
        ('{"path": "SHARD", "byte_offset": 512, "byte_size": 0}', "is empty: found 0 bytes"),
        ('{"path": "SHARD", "byte_offset": 512, "byte_size": 99999}', "a range of 99999 bytes does not lie inside"),
        ('{"path": "SHARD", "byte_offset": 99999, "byte_size": 1}', "at byte 99999: a range of 1 bytes"),
        ('{"path": "SHARD", "byte_offset": 9000000000000000000, "byte_size": 1}', "does not lie inside"),
        ('{"path": "SHARD", "byte_size": 3}', "bytes, the source_ref says 3"),
        ('{"path": "SHARD", "member": "none.jpg"}', "member 'none.jpg': the shard has no such member"),
        ('{"path": "SHARD", "member": "ok.jpg", "byte_size": 3}', "holds 100 bytes, the source_ref says 3"),
        ('{"path": "SHARD.gone"}', "No such file"),
        ('{"path": "SHARD.gone", "member": "a"}', "No such file"),
        ('{"path": "FOLDER"}', "is a folder"),
        ('{"path": "FOLDER/empty"}', "is empty: found 0 bytes"),
        ('{"path": "FOLDER/empty", "member": "a"}', "is empty (0 bytes), not a shard"),
        ('{"path": "FOLDER/text", "member": "a\\nb"}', r"member 'a\nb'"),
    ],
)
def test_what_is_wrong_with_a_row(tmp_path: Path, opener: Opener, ref: str | None, message: str) -> None:
    """Each wrong locator is one line on its row; its neighbours get their bytes."""
    shard = tmp_path / "a.tar"
    spans = make_tar(shard, {"ok.jpg": content(1, 100)})
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"x" * 2000)
    if ref is not None:
        ref = ref.replace("SHARD", str(shard)).replace("FOLDER", str(tmp_path))
    good = ref_of(shard, "ok.jpg", spans["ok.jpg"])
    found, _, stream = run([row("a", 0, good), row("b", 0, ref), row("c", 0, good)], opener)
    assert [r["binary_content"] for r in found] == [content(1, 100), None, content(1, 100)]
    error = found[1]["materialize_error"]
    assert message in error
    assert "\n" not in error
    assert found[0]["materialize_error"] is found[2]["materialize_error"] is None
    assert (stream.counts["errors"], stream.counts["materialized"]) == (1, 2)


def test_what_is_not_allowed_is_never_opened(tmp_path: Path, opener: Opener) -> None:
    """A locator outside the allowed places is an error of its row, in every strategy; the file is not opened."""
    shard, secret = tmp_path / "a.tar", tmp_path / "secret.tar"
    spans = make_tar(shard, {"ok.jpg": content(1, 100)})
    make_tar(secret, {"ok.jpg": b"secret"})
    refs = [ref_of(secret, "ok.jpg", (512, 6)), ref_of(secret, "ok.jpg"), ref_of(secret), '{"path":"http://h/x"}']
    rows = [row("a", i, ref) for i, ref in enumerate([*refs, ref_of(shard, "ok.jpg", spans["ok.jpg"])])]
    found, _, _ = run(rows, opener, allowed=lambda url: url == str(shard))
    assert [r["binary_content"] for r in found] == [None] * 4 + [content(1, 100)]
    assert all("outside the places that the configuration allows" in r["materialize_error"] for r in found[:4])
    assert set(opener.asked) == {str(shard)}


def test_a_read_that_fails_costs_one_row(tmp_path: Path, opener: Opener) -> None:
    """When one of many ranges of a request cannot be read, and is not a member's, the others still are."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 100) for i in range(6)}
    spans = make_tar(shard, members)
    opener(str(shard)).broken = {spans["1.jpg"][0], spans["3.jpg"][0]}
    rows = [row(n, 0, ref_of(shard, None, spans[n])) for n in members]
    rows += [row("t", k, ref_of(shard, None, spans["3.jpg"], k)) for k in range(2)]
    found, out, _ = run(rows, opener)
    with ParquetSink(tmp_path / "t.parquet", SCHEMA) as sink:
        for batch in out:
            sink.write(batch)
    assert pq.read_table(tmp_path / "t.parquet").to_pylist() == found
    assert [r["binary_content"] for r in found] == [
        None if name in ("1.jpg", "3.jpg") else data for name, data in members.items()
    ] + [None, None]
    assert "the disk says no" in found[1]["materialize_error"]
    assert "the disk says no" in found[3]["materialize_error"]
    assert "frame 1" in found[7]["materialize_error"]


def test_refused_credentials_are_not_an_error_of_a_row(tmp_path: Path, opener: Opener) -> None:
    """A file that new credentials would open is not published as missing: that raises, and loses no row."""
    shard = tmp_path / "a.tar"
    spans = make_tar(shard, {"0.jpg": content(0, 100)})

    def refuse(url: str) -> SourceFile:
        if url.startswith("s3://"):
            raise CredentialsError(url, "cannot be read: the credentials have expired")
        return opener(url)

    rows = [row("a", 0, ref_of(shard, "0.jpg", spans["0.jpg"])), row("a", 1, '{"path":"s3://bucket/x.jpg"}')]
    with pytest.raises(CredentialsError, match="have expired"):
        run(rows, refuse)


@pytest.mark.parametrize("fail_on_error", [False, True])
@pytest.mark.parametrize("how", ["range", "frame", "sparse", "compressed", "first bytes"])
def test_a_storage_failure_is_not_an_error_of_a_row(
    tmp_path: Path, opener: Opener, how: str, fail_on_error: bool
) -> None:
    """A shard that cannot be read now may be read later: that raises, whatever the policy, and loses no row."""
    members = {"0.jpg": content(0, 100), "1.jpg": content(1, 5000), "2.tiff": make_tiff(2)}
    shard = tmp_path / "a.tar"
    spans = make_tar(shard, members, compress=how in ("compressed", "first bytes"))
    broken = {"range": spans["1.jpg"][0], "frame": spans["2.tiff"][0], "sparse": spans["1.jpg"][0], "first bytes": 0}
    opener(str(shard)).broken = {broken.get(how, 4000)}
    ranged = how in ("range", "frame")
    rows = [row(n, 0, ref_of(shard, n, spans[n] if ranged else None)) for n in ("0.jpg", "1.jpg")]
    rows += [row("t", k, ref_of(shard, "2.tiff", spans["2.tiff"] if ranged else None, k)) for k in range(2)]
    with pytest.raises(ShardReadError, match=r"a\.tar.*the disk says no"):
        run(rows, opener, fail_on_error=fail_on_error)


@pytest.mark.parametrize("compress", [False, True])
def test_a_shard_that_is_truncated_while_it_is_read_raises(tmp_path: Path, opener: Opener, compress: bool) -> None:
    """A shard that is truncated once it is open is not a shard with short members."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 90_000) for i in range(8)}
    spans = make_tar(shard, members, compress=compress)
    opener(str(shard))
    os.truncate(shard, shard.stat().st_size // 2)
    rows = [row(n, 0, ref_of(shard, n, None if compress else spans[n])) for n in members]
    with pytest.raises(ShardReadError, match="it was truncated while being read"):
        run(rows, opener)


def test_a_storage_that_fails_once_is_asked_again(tmp_path: Path, opener: Opener) -> None:
    """Of ranges that fail together each is tried alone, and what then comes is used."""
    shard = tmp_path / "a.tar"
    members = {f"{i}.jpg": content(i, 100) for i in range(3)}
    spans = make_tar(shard, members)
    source = opener(str(shard))
    source.broken = {spans["1.jpg"][0]}
    real = source.read_into

    def once(*arguments: Any) -> None:
        try:
            real(*arguments)
        finally:
            source.broken = set()

    source.read_into = once  # type: ignore[method-assign]  # this one object fails once
    found, _, stream = run([row(n, 0, ref_of(shard, n, spans[n])) for n in members], opener)
    assert [r["binary_content"] for r in found] == list(members.values())
    assert stream.counts["errors"] == 0


def test_items_that_are_too_large(tmp_path: Path, opener: Opener) -> None:
    """An item over the limit is an error, in every strategy, and is not read."""
    members = {"x.jpg": content(1, 5000), "y.jpg": content(2, 50)}
    spans = make_tar(tmp_path / "a.tar", members)
    make_tar(tmp_path / "a.tgz", members, compress=True)
    (tmp_path / "x.jpg").write_bytes(members["x.jpg"])
    refs = [
        ref_of(tmp_path / "a.tar", "x.jpg", spans["x.jpg"]),
        ref_of(tmp_path / "a.tgz", "x.jpg"),
        ref_of(tmp_path / "x.jpg"),
    ]
    refs += [ref_of(tmp_path / "a.tgz", "y.jpg")]
    found, _, _ = run([row("a", i, ref) for i, ref in enumerate(refs)], opener, max_content_bytes=4000)
    assert ["holds 5000 bytes, allowed are 4000" in (r["materialize_error"] or "") for r in found] == [True] * 3 + [
        False
    ]
    assert found[3]["binary_content"] == members["y.jpg"]
    assert opener.sources[str(tmp_path / "a.tar")].reads == []


# -- policies
def mixed_rows(folder: Path) -> list[dict[str, Any]]:
    (folder / "x.jpg").write_bytes(content(1, 100))
    good, bad = ref_of(folder / "x.jpg"), ref_of(folder / "gone.jpg")
    rows = []
    for sample, refs in (("a", (good, good)), ("b", (good, bad, good)), ("c", (good,)), ("d", (good, good))):
        rows.append(row(sample, -1, None, modality="metadata"))
        rows += [row(sample, i, ref) for i, ref in enumerate(refs)]
    rows[-1]["materialize_error"] = "its token names no member"
    return rows


def names_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [(r["sample_id"], r["position"]) for r in rows]


@pytest.mark.parametrize("batch_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("cuts", [(), (4, 5, 6)])
def test_policies(tmp_path: Path, opener: Opener, cuts: tuple[int, ...], batch_bytes: int) -> None:
    """Errors are left on their rows, or the first is raised, with any batch boundaries."""
    rows = mixed_rows(tmp_path)
    kept, _, stream = run(rows, opener, cuts=cuts, batch_bytes=batch_bytes)
    assert names_of(kept) == names_of(rows)
    assert [names for names, r in zip(names_of(kept), kept, strict=True) if r["materialize_error"]] == [
        ("b", 1),
        ("d", 1),
    ]
    assert stream.counts["errors"] == 2

    with pytest.raises(SourceError, match=r"sample 'b', position 1: .*gone\.jpg.*No such file"):
        run(rows, opener, cuts=cuts, batch_bytes=batch_bytes, fail_on_error=True)
    with pytest.raises(SourceError, match="sample 'd', position 1: its token names no member"):
        run(rows[-3:], opener, fail_on_error=True)


def test_wrong_arguments() -> None:
    """A number that is not positive is refused at once."""
    for options in ({"batch_bytes": 0}, {"threads": 0}, {"max_content_bytes": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            MaterializeStream([], open_file=SourceFile, allowed=lambda _: True, **options)


def test_a_stream_is_iterated_once(tmp_path: Path, opener: Opener) -> None:
    """A second iteration is an error, not an empty table."""
    (tmp_path / "x.jpg").write_bytes(b"x")
    stream = MaterializeStream(
        [batch_of([row("a", 0, ref_of(tmp_path / "x.jpg"))])], open_file=opener, allowed=lambda _: True
    )
    assert len(list(stream)) == 1
    with pytest.raises(RuntimeError, match="once"):
        list(stream)
