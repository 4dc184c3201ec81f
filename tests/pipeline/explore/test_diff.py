"""Two versions of a dataset: which samples differ, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.dataset.add_stream import Values
from mm_assets.errors import ConfigError, SourceError
from mm_assets.fields import ScalarField
from mm_assets.pipeline.explore.diff import SampleChange, diff, find_version, list_versions, setting_changes
from mm_assets.pipeline.state import manifests
from mm_assets.pipeline.state.added_streams import NewStream, add_to_dataset
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import pending_partitions

from ..chain import declare, run_chain, run_partition
from ..shards import make_shard, png


def pairs(sizes: Mapping[str, int], caption: str = "caption") -> dict[str, object]:
    """Members of image-text samples whose images have these widths."""
    found: dict[str, object] = {}
    for name, width in sizes.items():
        found |= {f"{name}.png": png(len(name) + width, (8, width)), f"{name}.txt": f"{caption} {name}"}
        found[f"{name}.json"] = {"name": name}
    return found


def again(dataset: DatasetStore) -> manifests.ManifestReport:
    """Registers, runs what is pending, and makes the manifest."""
    register(dataset)
    for key in pending_partitions(dataset):
        run_partition(dataset, key)
    return manifests.build_manifest(dataset)


def changes(dataset: DatasetStore, old: str = "previous", new: str = "newest") -> dict[str, list[SampleChange]]:
    found = diff(dataset, find_version(dataset, old), find_version(dataset, new))
    return {key: list(found.samples(key)) for key in found.keys}


WIDE = {"type": "image_size", "scope": "sample"}


class Changed(NamedTuple):
    dataset: DatasetStore
    old: str
    new: str


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    """Two partitions; the second version has a stricter filter, which drops one sample of the first partition."""
    folder = tmp_path_factory.mktemp("filtered")
    make_shard(folder / "in" / "a.tar", pairs({"narrow": 10, "wide": 40}))
    make_shard(folder / "in" / "b.tar", pairs({"b1": 50, "b2": 60}))
    spec = declare(folder / "root", folder / "in", filters=[{**WIDE, "min_width": 5}])
    dataset, _ = run_chain(spec)
    old = find_version(dataset, "newest").digest
    stricter = DatasetStore(spec.replace(filters=({**WIDE, "min_width": 20},)))
    return Changed(stricter, old, again(stricter).digest)


def test_a_filter_that_drops_a_sample_is_named(filtered: Changed) -> None:
    """The removed sample has the filter, its reason and the measure, and the setting is named with both values."""
    found = diff(
        filtered.dataset, find_version(filtered.dataset, filtered.old), find_version(filtered.dataset, "newest")
    )
    assert found.keys == ("a",)
    assert found.unchanged == 1
    assert found.settings == ("filtered_rows: filters.image_size.min_width: 5 -> 20",)
    (partition,) = found
    assert (partition.state, partition.counts) == ("changed", {"added": 0, "removed": 1, "changed": 0})
    assert partition.reasons == found.settings
    (sample,) = found.samples("a")
    assert (sample.sample_id, sample.change, sample.reason, sample.filter) == (
        "narrow",
        "removed",
        "filter",
        "image_size",
    )
    assert sample.value == 10
    assert sample.detail == "image_size.width_below_min, measured 10"


def test_the_other_way_a_sample_is_added_by_settings(filtered: Changed) -> None:
    """From the stricter version to the other one the sample is added, because of the settings."""
    found = changes(filtered.dataset, filtered.new, filtered.old)
    assert [(s.sample_id, s.change, s.reason) for s in found["a"]] == [("narrow", "added", "settings")]
    assert "min_width: 20 -> 5" in found["a"][0].detail


def test_versions_are_found_by_name_prefix_and_path(filtered: Changed) -> None:
    """`newest`, `previous`, a prefix and a path name the same versions; other texts are refused with what there is."""
    dataset = filtered.dataset
    assert find_version(dataset, "newest").digest == find_version(dataset, filtered.new[:6]).digest == filtered.new
    assert find_version(dataset, "previous").digest == filtered.old
    path = dataset.store.url_of(f"manifests/{filtered.old}.json")
    assert find_version(dataset, path).digest == filtered.old
    for wrong in (filtered.new[:5], "0" * 12, "nonsense"):
        with pytest.raises(ConfigError, match=filtered.new[:12]):
            find_version(dataset, wrong)
    with pytest.raises(SourceError, match=r"other\.json"):
        find_version(dataset, dataset.store.url_of("other.json"))


def test_the_list_of_versions_starts_with_the_newest(filtered: Changed) -> None:
    """Both versions are listed with their samples and partitions."""
    listed = list_versions(filtered.dataset)
    assert [(v.digest, v.is_newest, v.num_samples) for v in listed] == [
        (filtered.new, True, 3),
        (filtered.old, False, 4),
    ]
    assert {version.num_partitions for version in listed} == {2}
    assert all(version.num_bytes > 0 for version in listed)


def test_without_a_record_the_shards_are_not_compared(filtered: Changed) -> None:
    """If the record of the older version is missing, that is said; the settings are named, and the filter still is."""
    dataset = filtered.dataset
    recipe = find_version(dataset, "previous").partitions["a"].recipe
    name = dataset.record_name("a", recipe)
    content = dataset.store.read_bytes(name)
    dataset.store.delete(name)
    found = diff(dataset, find_version(dataset, "previous"), find_version(dataset, "newest"))
    assert found.settings == ("filtered_rows: filters.image_size.min_width: 5 -> 20",)
    (partition,) = found
    assert f"the record of {filtered.old[:12]} is missing, so shards are not compared" in partition.reasons
    assert [s.detail for s in found.samples("a")] == ["image_size.width_below_min, measured 10"]
    dataset.store.write_bytes(name, content)


def test_the_command_shows_a_table_and_json(filtered: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms name partition, sample, filter and totals, the text the page that shows them too; N limits samples."""
    root = str(Path(filtered.dataset.store.url).parent)
    command = ["diff", "previous", "--dataset", "data", "--root", root]
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # what is next is for people
    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert "removed: narrow: filter: image_size.width_below_min, measured 10" in shown.output
    assert "0 added, 1 removed, 0 changed; 1 partition the same" in shown.output
    assert shown.output.count("min_width: 5 -> 20") == 1, "once above the table, not with each partition"
    assert f"next: mm-assets view {filtered.dataset.store.url} (page Versions" in shown.output
    listed = json.loads(CliRunner().invoke(main, [*command, "newest", "--json"]).stdout)["datasets"]["data"]
    assert listed["totals"] == {"added": 0, "removed": 1, "changed": 0}
    assert [s["sample_id"] for p in listed["partitions"] for s in p["samples"]] == ["narrow"]
    assert "narrow:" not in CliRunner().invoke(main, [*command, "--samples", "0"]).output
    wrong = CliRunner().invoke(main, ["diff", "abc", "--dataset", "data", "--root", root])
    assert (wrong.exit_code, "expected newest, previous" in wrong.output) == (2, True)


def test_a_row_that_a_filter_drops_changes_its_sample(tmp_path: Path) -> None:
    """A filter of rows leaves the sample, which lost its image: changed, with the filter and the modality."""
    make_shard(tmp_path / "in" / "a.tar", pairs({"narrow": 10, "wide": 40}))
    spec = declare(tmp_path / "root", tmp_path / "in", filters=[{"type": "image_size", "min_width": 5}])
    run_chain(spec)
    stricter = DatasetStore(spec.replace(filters=({"type": "image_size", "min_width": 20},)))
    again(stricter)
    (sample,) = changes(stricter)["a"]
    assert (sample.sample_id, sample.change, sample.reason, sample.filter) == ("narrow", "changed", "row", "image_size")
    assert sample.value == 10
    assert sample.modalities == ("image",)


def rewrite(shard: Path, members: dict[str, object]) -> None:
    """Another shard in the place of one, with a later time."""
    after = shard.stat().st_mtime_ns + 10**9
    make_shard(shard, members)
    os.utime(shard, ns=(after, after))


def test_a_changed_shard_explains_its_samples(tmp_path: Path) -> None:
    """Samples that left, joined or changed with their shard have different reasons, with the modality that differs."""
    shard = make_shard(tmp_path / "in" / "a.tar", pairs({"stays": 10, "leaves": 11, "changes": 12}))
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in", pack="image_text"))
    other = pairs({"stays": 10, "changes": 12}) | {"changes.txt": "another caption"}
    rewrite(shard, other | pairs({"joins": 13}))
    again(dataset)
    found = {s.sample_id: s for s in changes(dataset)["a"]}
    assert {name: (s.change, s.reason) for name, s in found.items()} == {
        "leaves": ("removed", "shard"),
        "joins": ("added", "shard"),
        "changes": ("changed", "shard"),
    }
    assert found["changes"].modalities == ("text",)
    (partition,) = diff(dataset, find_version(dataset, "previous"), find_version(dataset, "newest"))
    assert "its shards changed" in partition.reasons


def test_partitions_come_and_go_with_their_shards(tmp_path: Path) -> None:
    """A new shard is an added partition and a removed one a removed partition; all their samples are listed."""
    make_shard(tmp_path / "in" / "a.tar", pairs({"a1": 10, "a2": 11}))
    make_shard(tmp_path / "in" / "b.tar", pairs({"b1": 10}))
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    (tmp_path / "in" / "b.tar").unlink()
    make_shard(tmp_path / "in" / "c.tar", pairs({"c1": 10}))
    again(dataset)
    found = diff(dataset, find_version(dataset, "previous"), find_version(dataset, "newest"))
    states = {p.partition: (p.state, p.counts, p.reasons) for p in found}
    assert states["b"][:2] == ("removed", {"added": 0, "removed": 1, "changed": 0})
    assert states["b"][2] == ("its shards are missing",)
    assert states["c"][:2] == ("added", {"added": 1, "removed": 0, "changed": 0})
    assert [s.sample_id for s in found.samples("b")] == ["b1"]
    assert [s.sample_id for s in found.samples("c")] == ["c1"]


def test_an_added_stream_changes_the_samples_that_have_it(tmp_path: Path) -> None:
    """A stream that was added is the reason of its partition, and the modality of the samples that have a value."""
    make_shard(tmp_path / "in" / "a.tar", pairs({"a1": 10, "a2": 30}))
    dataset, _ = run_chain(declare(tmp_path / "root", tmp_path / "in"))
    values = Values("table", {"a1": 0}, [0.5], lambda item: item)
    field = ScalarField(dtype="float32")
    added = list(add_to_dataset(dataset, "score", field, values))
    manifests.build_manifest(dataset, stream=NewStream(name="score", field=field, partitions=added))
    (partition,) = diff(dataset, find_version(dataset, "previous"), find_version(dataset, "newest"))
    assert partition.reasons == ("stream 'score' was added",)
    (sample,) = changes(dataset)["a"]
    assert (sample.sample_id, sample.change, sample.modalities) == ("a1", "changed", ("score",))


def test_of_cleaned_files_only_counts_are_known(tmp_path: Path) -> None:
    """Where the old packed file is gone, the numbers of samples remain and the note says so."""
    make_shard(tmp_path / "in" / "a.tar", pairs({"a1": 10, "a2": 30}))
    spec = declare(tmp_path / "root", tmp_path / "in", filters=[{**WIDE, "min_width": 5}])
    run_chain(spec)
    stricter = DatasetStore(spec.replace(filters=({**WIDE, "min_width": 20},)))
    again(stricter)
    old = find_version(stricter, "previous")
    for form in old.formats:
        for path in old.files("a", form):
            stricter.store.delete(path)
    found = diff(stricter, old, find_version(stricter, "newest"))
    (partition,) = found
    assert (partition.counts, partition.num_old, partition.num_new) == (None, 2, 1)
    assert "was cleaned: only counts are known" in partition.note
    assert list(found.samples("a")) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"a": 1}, {"a": 2}, ["s.a: 1 -> 2"]),
        ([{"type": "blur", "min": 1}], [{"type": "blur", "min": 2}], ["s.blur.min: 1 -> 2"]),
        ([], [{"type": "blur"}], ['s.blur: new, {"type": "blur"}']),
        ([{"type": "a"}], [{"type": "a"}, {"type": "b"}], ['s.b: new, {"type": "b"}']),
        ({"x": [1, 2]}, {"x": [1, 3]}, ["s.x: [1, 2] -> [1, 3]"]),
        ({"x": 1}, {"x": 1}, []),
    ],
)
def test_setting_changes_name_the_place(before: Any, after: Any, said: list[str]) -> None:
    """Each difference is named with its path and both values; filters and columns by their names."""
    assert setting_changes(before, after, "s") == said
