"""Searching by vectors: scans, indexes of dataset versions, conditions, and what damaged indexes do."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mm_assets
from mm_assets.dataset import vector_file
from mm_assets.dataset.manifest import ManifestPartition, file_path, make_manifest
from mm_assets.dataset.vectors import prepared
from mm_assets.errors import ConfigError, FormatError, SchemaMismatchError, SourceError
from mm_assets.fields import Field, NDArrayField, TextField
from mm_assets.formats import MappedFile, crc32c

from .samples import make_manifest as make_dataset

DIMENSIONS = 4
FIELDS = {"vector": NDArrayField("float32", (DIMENSIONS,)), "text": TextField()}

Vectors = Sequence[npt.ArrayLike | None]


def write_version(folder: Path, partitions: Mapping[str, Vectors], fields: Mapping[str, Field] = FIELDS) -> Path:
    """A dataset version with a vector, or none, for each sample of its partitions; returns its manifest."""
    entries = []
    (folder / "packed").mkdir(parents=True, exist_ok=True)
    for key, vectors in sorted(partitions.items()):
        with mm_assets.create(folder / "new.mstr", fields, fsync=False) as writer:
            for number, vector in enumerate(vectors):
                value = None if vector is None else np.asarray(vector, np.float32)
                others = {name: f"{number}" if name == "text" else value for name in fields if name != "vector"}
                writer.write(f"{key}-{number}", {"vector": value, **others})
        content = (folder / "new.mstr").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        (folder / "new.mstr").rename(folder / file_path("mstr", key, digest))
        entries.append(
            ManifestPartition(
                key=key,
                recipe=digest[:16],
                num_samples=len(vectors),
                packed={"mstr": (len(content), digest)},
                tables={},
                streams={},
                decodable={"mode": "full", "on_undecodable": "keep", "judged": 0, "undecodable": 0},
                losses={},
            )
        )
    document = make_manifest(
        dataset="test", schema={}, partitions=entries, added=(), losses={}, duplicate_ids=None, settings={}
    )
    path = folder / "manifest.json"
    path.write_text(json.dumps(document))
    return path


def clusters(count: int, dimensions: int = DIMENSIONS, seed: int = 0) -> npt.NDArray[np.float32]:
    """Vectors around a few dozen centers."""
    random = np.random.default_rng(seed)
    centers = random.standard_normal((40, dimensions))
    return (centers[random.integers(0, 40, count)] + 0.4 * random.standard_normal((count, dimensions))).astype("f4")


def reference(vectors: Vectors, query: npt.ArrayLike, metric: str) -> dict[int, float]:
    """The score of each sample that can be compared, in double precision."""
    q = np.asarray(query, np.float64)
    found = {}
    for index, vector in enumerate(vectors):
        if vector is None:
            continue
        v = np.asarray(vector, np.float64)
        if not np.isfinite(v).all() or (metric == "cosine" and not v.any()):
            continue
        if metric == "l2":
            found[index] = -float(np.linalg.norm(v - q))
        else:
            scale = np.linalg.norm(v) * np.linalg.norm(q) if metric == "cosine" else 1
            found[index] = float(v @ q / scale)
    return found


def check(found: Any, expected: Mapping[int, float], k: int) -> None:
    """A result has the k best of the expected scores, each with its sample."""
    best = sorted(expected.values(), reverse=True)[:k]
    assert len(found) == len(set(found.indices.tolist())) == len(best)
    np.testing.assert_allclose(found.scores, best, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.scores, [expected[i] for i in found.indices.tolist()], rtol=1e-4, atol=1e-4)


@pytest.fixture
def small_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few vectors have lists too, which otherwise only thousands have."""
    monkeypatch.setattr(vector_file, "_MIN_LISTED", 8)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version of 6,000 vectors in three partitions, with an index for the cosine."""
    vectors = clusters(6030, 16)[:6000]
    parts = {f"p{number}": list(vectors[number * 2000 : (number + 1) * 2000]) for number in range(3)}
    fields = {"vector": NDArrayField("float32", (16,))}
    path = write_version(tmp_path_factory.mktemp("large"), parts, fields)
    with mm_assets.open(path) as data:
        summary = data.build_index("vector")
    assert (summary.num_samples, summary.num_vectors, summary.num_written, summary.num_files) == (6000, 6000, 6000, 1)
    assert summary.recall >= vector_file.TARGET_RECALL
    return path


# --- results ----------------------------------------------------------------------------------------------------------

numbers = st.floats(-8, 8, width=16)
vector = st.lists(numbers, min_size=DIMENSIONS, max_size=DIMENSIONS)
odd = st.sampled_from([None, [0.0] * DIMENSIONS, [np.nan, 1, 1, 1], [np.inf, 0, 0, 0]])


@settings(max_examples=12, deadline=None)
@given(
    vectors=st.lists(vector | odd, min_size=1, max_size=12),
    query=vector.filter(any),
    metric=st.sampled_from(["cosine", "ip", "l2"]),
    k=st.integers(1, 15),
    chosen=st.data(),
)
def test_scan_and_index_find_what_numpy_finds(
    tmp_path_factory: pytest.TempPathFactory, vectors: Vectors, query: list[float], metric: Any, k: int, chosen: Any
) -> None:
    """With and without an index, of all samples, a view or a condition, results are those of a plain NumPy program."""
    half = len(vectors) // 2
    path = write_version(tmp_path_factory.mktemp("v"), {"a": vectors[:half], "b": vectors[half:]})
    expected = reference(vectors, query, metric)
    rows = chosen.draw(st.lists(st.integers(0, len(vectors) - 1), max_size=6))
    limit = chosen.draw(st.integers(0, len(vectors)))
    with mm_assets.open(path) as data:
        scanned = data.search(query, k=k, metric=metric)
        check(scanned, expected, k)
        present = sum(one is not None for one in vectors)
        assert (scanned.num_vectors, scanned.num_excluded) == (len(expected), present - len(expected))
        if present:
            summary = data.build_index("vector", metric=metric)
            assert (summary.num_vectors, summary.num_excluded) == (len(expected), present - len(expected))
        assert data.search(query, k=k, metric=metric, exact=False if present else None) == scanned
        below = {i: score for i, score in expected.items() if i < limit}
        view = data.select(rows)
        of_view = {rows.index(i): expected[i] for i in set(rows) & expected.keys()}
        for exact in (None, True):
            check(data.search(query, k=k, metric=metric, where=f"index < {limit}", exact=exact), below, k)
            check(view.search(query, k=k, metric=metric, exact=exact), of_view, k)


@pytest.mark.parametrize("where", [None, "index % 3 = 0", "index % 40 = 7", "index = 11", "index > 9000"])
def test_an_index_finds_most_of_the_nearest(large: Path, where: str | None) -> None:
    """Of the ten nearest that a scan finds, an index finds 9 of 10, whatever a condition leaves of the samples."""
    with mm_assets.open(large) as data:
        queries = clusters(6030, 16)[6000:]
        exact = data.search(queries, where=where, exact=True)
        found = data.search(queries, where=where, exact=False)
        assert not exact.approximate
        assert found.approximate == (where in (None, "index % 3 = 0"))
        existing = exact.indices >= 0
        hits = [len(np.intersect1d(a[a >= 0], b[b >= 0])) for a, b in zip(exact.indices, found.indices, strict=True)]
        assert sum(hits) >= 0.9 * existing.sum()
        assert (found.ids[found.indices < 0] == "").all()
        assert np.isnan(found.scores[found.indices < 0]).all()
        everything = data.search(queries, where=where, exact=False, probes=10_000)
        assert everything.ids.tolist() == exact.ids.tolist()
        np.testing.assert_array_equal(everything.scores, exact.scores)


def test_more_like_a_sample(large: Path) -> None:
    """A sample is searched by index or id and is not in its own result; several queries are the rows of one result."""
    with mm_assets.open(large) as data:
        by_index = data.search(2001, k=5)
        assert by_index == data.search("p1-1", k=5) == data.search(np.int64(2001), k=5)
        assert 2001 not in by_index.indices.tolist()
        vector = data[2001]["vector"]
        many = data.search([vector, vector * 3], k=6)
        assert many.indices.shape == many.scores.shape == many.ids.shape == (2, 6)
        assert many.indices[:, 0].tolist() == [2001, 2001]
        assert many.indices[0, 1:].tolist() == by_index.indices.tolist()
        near = data.select([5, 2001, int(by_index.indices[0]), 2001])
        assert near.search(3).ids.tolist() == [by_index.ids[0], "p0-5"]
        assert near.search(3, where="index != 1 and index != 3").ids.tolist() == [by_index.ids[0], "p0-5"]
        near.close()
        copy = pickle.loads(pickle.dumps(data))
        assert copy.search(2001, k=5, exact=False) == by_index
        copy.close()
        other = data.select([7, 8, 9])
    assert len(other.search(vector, exact=False)) == 3
    other.close()
    with pytest.raises(ValueError, match="closed"):
        data.search(vector)


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_large_and_small_numbers(tmp_path: Path, metric: Any) -> None:
    """Vectors of any length are compared by their direction; those whose squares are too large for float32 only so."""
    huge, small = [1e30, 0, 0, 0], [1e-30, 0, 0, 0]
    with mm_assets.open(write_version(tmp_path, {"a": [huge, small, [2e18, 0, 0, 0], [0, 1, 0, 0]]})) as data:
        found = data.search([1, 0, 0, 0], metric=metric)
        if metric == "cosine":
            assert found.scores.tolist() == [1, 1, 1, 0]
        else:
            assert (found.num_vectors, found.num_excluded) == (3, 1)
            assert set(found.ids.tolist()) == {"a-1", "a-2", "a-3"}
        assert data.search(huge if metric == "cosine" else [2e18, 0, 0, 0], metric=metric).ids[0] in ("a-0", "a-2")


def test_several_modalities_are_merged_by_score(tmp_path: Path) -> None:
    """A sample has the best score of the searched modalities, once, and is searched by the vector of either."""
    fields = {"picture": NDArrayField("float32", (2,)), "words": NDArrayField("float16", (2,))}
    with mm_assets.create(tmp_path / "both/", fields) as writer:
        writer.write("x", {"picture": np.array([1, 0], "f4"), "words": np.array([0, 1], "f2")})
        writer.write("y", {"picture": np.array([1, 1], "f4"), "words": None})
        writer.write("z", {"picture": None, "words": np.array([3, 0], "f2")})
    with mm_assets.open(tmp_path / "both") as data:
        for name in ("words", "picture"):
            found = data.search([1, 0], ["picture", "words"])
            assert [(i, m) for i, m in zip(found.ids, found.modality, strict=True)] == [
                ("x", "picture"),
                ("z", "words"),
                ("y", "picture"),
            ]
            data.build_index(name)
        assert data.search("x", "picture", query_modality="words").ids.tolist() == ["y"]
        with pytest.raises(ConfigError, match="picture, words"):
            data.search([1, 0])


def test_vectors_of_free_length(tmp_path: Path) -> None:
    """A field without a shape is searched if all vectors have one length; else the sample is named."""
    with mm_assets.create(tmp_path / "free/", {"vector": NDArrayField()}) as writer:
        for number, length in enumerate((3, 3, 4)):
            writer.write(str(number), {"vector": np.arange(1, length + 1)})
    with mm_assets.open(tmp_path / "free") as data:
        with pytest.raises(SchemaMismatchError, match=r"sample '2', modality 'vector': found int64 of shape \(4,\)"):
            data.search([1, 2, 3], "vector")
        assert data.select([0, 1]).search([1, 2, 3], "vector").ids.tolist() == ["0", "1"]
        with pytest.raises(SchemaMismatchError, match="sample '2'"):
            data.build_index("vector")
    assert not list((tmp_path / "free" / "indexes").glob("*"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": [1, 2]}, ConfigError, "found 2 numbers, but the vectors of 'vector' have 4"),
        ({"query": [0, 0, 0, 0]}, ConfigError, "vector is zero"),
        ({"query": [[1, 1, 1, 1], [np.nan] * 4]}, ConfigError, "vector 1 is"),
        ({"query": "who"}, ConfigError, "expected the id of a sample"),
        ({"query": 1}, ConfigError, "sample 'a-1' has no 'vector'"),
        ({"query": 9}, IndexError, "index 9"),
        ({"query": None}, ConfigError, "expected a vector"),
        ({"k": 0}, ConfigError, "at least 1"),
        ({"probes": 0}, ConfigError, "at least 1"),
        ({"metric": "dot"}, ConfigError, "cosine, ip, l2"),
        ({"modality": "vektor"}, KeyError, "did you mean vector"),
        ({"modality": "text"}, SchemaMismatchError, "expected vectors"),
        ({"modality": []}, ConfigError, "no name"),
        ({"where": "index <"}, ConfigError, "sql"),
        ({"exact": False}, SourceError, "mm-assets index .* --stream vector --metric cosine"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """What is wrong with a query is said with what was expected."""
    with (
        mm_assets.open(write_version(tmp_path, {"a": [[1, 2, 3, 4], None]})) as data,
        pytest.raises(error, match=message),
    ):
        data.search(**{"query": [1, 2, 3, 4], **arguments})


def test_what_has_no_index(tmp_path: Path) -> None:
    """A view, a file without a manifest and samples without vectors have no index, and the first two are scanned."""
    path = write_version(tmp_path, {"a": [[1, 2, 3, 4], [4, 3, 2, 1]], "b": [None]})
    with mm_assets.open(path) as data:
        with pytest.raises(ConfigError, match="is a view"):
            data.select([0]).build_index("vector")
        (file, _) = data.files
    with mm_assets.open(file) as data:
        with pytest.raises(ConfigError, match="has no manifest"):
            data.build_index("vector")
        assert data.search([1, 2, 3, 4]).ids.tolist() == ["a-0", "a-1"]
    free = {"vector": NDArrayField(), "text": TextField()}
    path = write_version(tmp_path / "none", {"a": [None]}, free)
    with mm_assets.open(path) as data, pytest.raises(SchemaMismatchError, match="no sample has"):
        data.build_index("vector")


# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_lists")
@pytest.mark.parametrize("seed", range(4))
def test_an_updated_index_is_what_a_rebuilt_one_is(tmp_path: Path, seed: int) -> None:
    """After partitions were added, replaced and removed, an updated index finds what a scan finds, and writes less."""
    random = np.random.default_rng(seed)
    parts: dict[str, Vectors] = {f"p{number}": list(clusters(30, seed=number)) for number in range(6)}
    written = []
    for step in range(8):
        with mm_assets.open(write_version(tmp_path, parts)) as data:
            summary = data.build_index("vector")
            written.append(summary.num_written)
            assert summary.num_vectors == len(data)
            assert summary.num_files <= 9
            again = data.build_index("vector")
            assert (again.num_written, again.url, again.num_bytes) == (0, summary.url, summary.num_bytes)
            queries = clusters(5, seed=99)
            exact, found = data.search(queries, exact=True), data.search(queries, exact=False, probes=999)
            assert found.ids.tolist() == exact.ids.tolist()
            np.testing.assert_array_equal(found.scores, exact.scores)
        change = random.integers(0, 3)
        key = str(random.choice(sorted(parts)))
        if change == 0:
            parts[f"q{step}"] = list(clusters(10, seed=100 + step))
        elif change == 1:
            parts[key] = list(clusters(31, seed=200 + step))
        elif len(parts) > 2:
            del parts[key]
        else:
            parts["r"] = list(clusters(9, seed=300 + step))
    assert written[0] == 180
    assert min(written[1:]) < 100


def test_vectors_are_used_again(tmp_path: Path) -> None:
    """A small partition adds a file, a removed one adds none; a file that is mostly of others is written again."""
    parts: dict[str, Vectors] = {"a": list(clusters(100)), "b": list(clusters(100, seed=1)), "c": list(clusters(10))}

    def build(keys: str) -> tuple[int, int]:
        with mm_assets.open(write_version(tmp_path, {key: parts[key] for key in keys})) as data:
            summary = data.build_index("vector")
            return summary.num_written, summary.num_files

    assert build("ab") == (200, 1)
    assert build("abc") == (10, 2)
    assert build("ac") == (110, 1)
    assert build("a") == (0, 1)
    assert build("ab") == (0, 1), "the index of a former version is there"


def test_a_version_with_other_vectors_has_no_index(tmp_path: Path) -> None:
    """An index is of one version: samples of the same ids with other vectors are scanned, and never found by it."""
    with mm_assets.open(write_version(tmp_path, {"a": [[1, 0, 0, 0], [0, 1, 0, 0]]})) as data:
        data.build_index("vector")
    with mm_assets.open(write_version(tmp_path, {"a": [[0, 1, 0, 0], [1, 0, 0, 0]]})) as data:
        assert data.search([1, 0, 0, 0], k=1).ids.tolist() == ["a-1"]
        with pytest.raises(SourceError, match="has no index"):
            data.search([1, 0, 0, 0], exact=False)


@pytest.mark.parametrize("modality", ["state", "added"])
def test_an_index_serves_both_packed_formats(tmp_path: Path, modality: str) -> None:
    """The index of a packed modality or an added stream is built from MULT and used by readers of MSTR as well."""
    streams = {"added": NDArrayField("float32", (2,))}
    path = make_dataset(tmp_path / "x", [4, 0, 5], streams=streams, value_of=lambda _, i: np.array([1, i], np.float32))
    with mm_assets.open(path) as data:
        summary = data.build_index(modality)
        assert (summary.num_vectors, summary.num_excluded) == ((8, 1) if modality == "state" else (9, 0))
        expected = data.search(3, modality, k=4, exact=True)
    for form in ("mult", "mstr"):
        with mm_assets.open(path, format=form) as data:
            assert data.search("id-3", modality, k=4, exact=False) == expected


# --- damage -----------------------------------------------------------------------------------------------------------


def _search(path: Path) -> Any:
    with mm_assets.open(path) as data:
        return data.search(clusters(1, seed=5)[0], k=3, exact=False)


@pytest.mark.usefixtures("small_lists")
def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    """A changed, truncated or extended file of an index is an error that says what to do, or does not matter."""
    path = write_version(tmp_path, {"a": list(clusters(24))})
    with mm_assets.open(path) as data:
        expected = data.search(clusters(1, seed=5)[0], k=3)
        data.build_index("vector")
    (record,), (vectors,) = ((tmp_path / "indexes").glob(f"*.{end}") for end in ("json", "vectors"))
    for file in (record, vectors):
        content = file.read_bytes()
        damaged = [content[:size] for size in range(0, len(content), 7)] + [content + b"\0"]
        damaged += [content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :] for at in range(0, len(content), 3)]
        messages = []
        for one in damaged:
            file.write_bytes(one)
            try:
                assert _search(path) == expected
            except (FormatError, SourceError) as error:
                messages.append(str(error))
        assert len(messages) > 0.9 * len(damaged)
        assert [message for message in messages if "`mm-assets index`" not in message] == []
        file.write_bytes(content)
    assert _search(path) == expected


@pytest.mark.usefixtures("small_lists")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wrong_numbers_with_right_checksums(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """A file whose checksums are right and whose numbers are not is refused, or gives a result, and nothing else."""
    path = tmp_path_factory.mktemp("wrong") / "x.vectors"
    vectors = prepared(clusters(24), "cosine")[0]

    def blocks(rows: npt.NDArray[np.int64] | None) -> Iterator[tuple[npt.NDArray[np.int64], Any]]:
        chosen = np.arange(24) if rows is None else rows
        yield chosen, vectors[chosen]

    vector_file.write_vector_file(path, blocks, num_rows=24, dimensions=DIMENSIONS, metric="cosine")
    content = bytearray(path.read_bytes())
    header = np.frombuffer(content, vector_file.HEADER, 1)
    end = len(content) - 24 * DIMENSIONS * 4
    number = st.sampled_from([0, 1, 2, 3, 7, 24, 25, 255, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    if data.draw(st.booleans()):
        field = data.draw(st.sampled_from(["metric", "dimensions", "num_lists", "num_vectors", "num_probes"]))
        header[field] = data.draw(number) & (256 ** header.dtype[field].itemsize - 1)
    else:
        at = data.draw(st.integers(16, (end - 8) // 8)) * 8
        content[at : at + 8] = data.draw(number).to_bytes(8, "little")
    header["tables_crc32c"] = crc32c(memoryview(content)[64:end])
    header["crc32c"] = crc32c(memoryview(content)[:60])
    path.write_bytes(content)
    try:
        file = vector_file.VectorFile(MappedFile(path), 24)
        for probes in (1, 2, 100):
            ((slots, scores),), _ = file.search(vectors[:1, : file.dimensions], 5, probes=probes)
            assert len(slots) == len(scores) <= 5
        file.close()
    except FormatError as error:
        assert str(path) in str(error)  # noqa: PT017 - not `pytest.raises`: most damage is refused, some is harmless


@pytest.mark.parametrize("end", ["json", "vectors"])
@pytest.mark.parametrize("damage", ["changed", "truncated", "missing"])
def test_a_damaged_index_is_built_again(tmp_path: Path, end: str, damage: str) -> None:
    """Building an index that is damaged writes it again; one that is complete is left as it is."""
    path = write_version(tmp_path, {"a": list(clusters(20))})
    with mm_assets.open(path) as data:
        data.build_index("vector")
    (file,) = (tmp_path / "indexes").glob(f"*.{end}")
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(
            content[:-9] if damage == "truncated" else content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        )
    with mm_assets.open(path) as data:
        assert data.build_index("vector").num_written == 20
        assert len(data.search([1, 2, 3, 4], exact=False)) == 10
    assert file.read_bytes() == content


# --- remote -----------------------------------------------------------------------------------------------------------


def test_an_index_behind_a_url(large: Path) -> None:
    """The index of a dataset in an object store is read by ranges, and finds what the local one finds."""
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(large.parent), "/search", recursive=True)
    try:
        with mm_assets.open("memory://search") as remote, mm_assets.open(large) as local:
            queries = clusters(4, 16, seed=3)
            assert remote.search(queries, exact=False) == local.search(queries, exact=False)
            assert remote.build_index("vector").num_written == 0
            assert remote.build_index("vector", metric="l2").num_written == 6000
            assert remote.search(queries, metric="l2", exact=False, probes=999) == remote.search(
                queries, metric="l2", exact=True
            )
    finally:
        memory.rm("/search", recursive=True)
