"""`formats`: a dataset that is packed in one format, and what another list of formats makes stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.cli.main import main
from mm_assets.errors import ConfigError, SourceError
from mm_assets.fields import ScalarField
from mm_assets.orchestration.build import build_definitions
from mm_assets.orchestration.report import published_result
from mm_assets.pipeline.chain import RECORDED_STAGES, recorded_stages, summary_numbers
from mm_assets.pipeline.partition.run import run_partition
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean, manifests
from mm_assets.pipeline.state.added_streams import add_to_dataset
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import Present, pending_partitions, stale_partitions
from tests.dataset.test_add_stream import values_of

from ..chain import declare, marker_of, run_chain
from ..shards import CAPTIONS, make_shard

FORMATS = ("mult", "mstr")


def other(form: str) -> str:
    return next(name for name in FORMATS if name != form)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], DatasetStore]:
    """The same two partitions, two of whose ids are the same, in a manifest of each list of formats."""
    folder = tmp_path_factory.mktemp("formats")
    make_shard(folder / "in" / "s.tar", CAPTIONS)
    make_shard(folder / "in" / "t.tar", {f"{i}.txt": f"text {i}" for i in (3, 9)})
    found = {}
    for formats in (FORMATS, ("mult",), ("mstr",)):
        root = folder / "-".join(formats)
        found[formats], _ = run_chain(declare(root, folder / "in" / "*.tar", formats=list(formats), pack="generic"))
    return found


def changed(dataset: DatasetStore, tmp_path: Path, *formats: str) -> DatasetStore:
    """A copy of it, declared with other formats."""
    shutil.copytree(dataset.spec.root, tmp_path / "root")
    return DatasetStore(dataset.spec.replace(root=str(tmp_path / "root"), formats=formats))


def contents(dataset: DatasetStore, *folders: str) -> dict[str, bytes]:
    root = Path(dataset.store.path_of(""))
    return {str(p.relative_to(root)): p.read_bytes() for folder in folders for p in sorted(root.glob(f"{folder}/*"))}


def run(dataset: DatasetStore) -> list[str]:
    """Runs what is pending; the stages that ran, of the first partition."""
    ran = []
    for key in pending_partitions(dataset):
        report = run_partition(dataset.spec, dataset.partition(key), dataset.schema())
        assert report.ok, report.failure
        ran.append(list(report.results))
    return ran[0]


@pytest.mark.parametrize("form", FORMATS)
def test_one_format_is_what_both_hold_of_it(made: dict[tuple[str, ...], DatasetStore], form: str) -> None:
    """A dataset of one format has that file alone in marker and manifest, with the same bytes as beside the other."""
    one, both = made[form,], made[FORMATS]
    packed = {name: content for name, content in contents(both, "packed").items() if name.endswith(form)}
    assert contents(one, "packed") == packed
    assert other(form) not in marker_of(one, "s")["files"]
    manifest = manifests.build_manifest(one).manifest
    assert [list(shard["files"]) for shard in manifest["shards"]] == [[form], [form]]
    assert manifest["duplicate_ids"] == manifests.build_manifest(both).manifest["duplicate_ids"]
    assert manifest["duplicate_ids"]["count"] == 1
    assert f"packed_{other(form)}" not in {stage.name for stage in one.records("s")}


@pytest.mark.parametrize("form", FORMATS)
def test_a_manifest_of_one_format_opens(made: dict[tuple[str, ...], DatasetStore], form: str) -> None:
    """It is opened without naming the format, reads as that of both does, and refuses the other with a message."""
    url = made[form,].store.url_of("manifest.json")
    with mm_assets.open(url) as one, mm_assets.open(made[FORMATS].store.url_of("manifest.json")) as both:
        assert one.manifest is not None
        assert one.manifest.formats == (form,)
        assert list(one.sample_ids) == list(both.sample_ids)
        assert [one[i]["text"] for i in range(len(one))] == [both[i]["text"] for i in range(len(both))]
    with pytest.raises(
        ConfigError, match=f"format: found '{other(form)}', but .*manifest.json lists only {form} files"
    ):
        mm_assets.open(url, format=other(form))


@pytest.mark.parametrize("form", FORMATS)
def test_the_commands_take_a_dataset_of_one_format(made: dict[tuple[str, ...], DatasetStore], form: str) -> None:
    """`verify` checks the files that there are, `inspect` shows them, and the summary has their numbers."""
    dataset = made[form,]
    for place in (dataset.store.url_of("manifest.json"), dataset.store.url_of("")):
        done = CliRunner().invoke(main, ["verify", place])
        assert done.exit_code == 0
        assert f"({form}): ok" in done.output
        assert f"({other(form)})" not in done.output
    assert "6 samples" in CliRunner().invoke(main, ["inspect", dataset.store.url_of("manifest.json")]).output
    assert list(summary_numbers(dataset.spec))[-2:] == ["samples", f"{form.upper()} bytes"]
    assert list(summary_numbers(made[FORMATS].spec))[-2:] == ["samples", "MULT bytes"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_that_is_added_is_packed_alone(
    made: dict[tuple[str, ...], DatasetStore], tmp_path: Path, form: str
) -> None:
    """A longer list announces and runs the packing of the new format only, and gives the files of a run with both."""
    dataset = changed(made[form,], tmp_path, *FORMATS)
    stage = f"packed_{other(form)}"
    for stale in stale_partitions(Present(dataset), pending_partitions(dataset)).values():
        assert (stale.first.name, stale.said) == (stage, f"{stage} has not been made")
    assert run(dataset) == [stage]
    assert manifests.build_manifest(dataset).left_out == {}
    for folder in ("packed", "records", "published", "filtered_rows"):
        assert contents(dataset, folder) == contents(made[FORMATS], folder)
    assert dataset.store.read_bytes("manifest.json") == made[FORMATS].store.read_bytes("manifest.json")


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_that_is_removed_runs_no_stage(
    made: dict[tuple[str, ...], DatasetStore], tmp_path: Path, form: str
) -> None:
    """A shorter list makes markers and manifest again, and cleaning removes the files that no manifest has then."""
    dataset = changed(made[FORMATS], tmp_path, form)
    stale = stale_partitions(Present(dataset), pending_partitions(dataset))
    assert [found.first.name for found in stale.values()] == ["published", "published"]
    assert run(dataset) == []
    assert manifests.build_manifest(dataset).left_out == {}
    assert dataset.store.read_bytes("manifest.json") == made[form,].store.read_bytes("manifest.json")
    assert not [name for name in clean.clean(dataset).files if name.startswith("packed/")]
    removed = [name for name in clean.clean(dataset, keep=1).files if name.startswith("packed/")]
    assert len(removed) == 2
    assert all(name.endswith(other(form)) for name in removed)
    assert contents(dataset, "packed") == contents(made[form,], "packed")
    assert pending_partitions(dataset) == []


@pytest.mark.parametrize("form", FORMATS)
def test_dagster_has_the_assets_of_the_formats(made: dict[tuple[str, ...], DatasetStore], form: str) -> None:
    """There is no asset for a format that is not packed, and `published` follows from the others."""
    spec = made[form,].spec
    graph = build_definitions(spec).resolve_asset_graph()
    names = {key.path[-1] for key in graph.get_all_asset_keys()}
    assert names == {stage.name for stage in recorded_stages(spec)} | {"published", "manifest", "shards"}
    assert len(names) == len(RECORDED_STAGES) + 2


def test_streams_need_mstr(made: dict[tuple[str, ...], DatasetStore]) -> None:
    """A stream cannot be added to a dataset without MSTR files; the message names the setting."""
    with pytest.raises(SourceError, match="'s' has no MSTR file: add `mstr` to `formats`"):
        list(add_to_dataset(made["mult",], "score", ScalarField(dtype="float32"), None))  # type: ignore[arg-type]  # not reached


@pytest.mark.parametrize("formats", [[], ["mult", "mult"]])
def test_formats_name_each_once(formats: list[str]) -> None:
    """An empty list and one that repeats a format are refused."""
    with pytest.raises(ConfigError, match=r"formats: is \[.*\], expected mult, mstr or both"):
        declare(Path("root"), "in", formats=formats)


def test_the_order_of_formats_is_not_a_difference() -> None:
    """The same formats in another order are the same declaration; an unknown one is refused with the known ones."""

    def spec(*formats: Any) -> DatasetSpec:
        return declare(Path("root"), "in", formats=list(formats))

    assert spec("mstr", "mult") == spec("mult", "mstr") == declare(Path("root"), "in")
    with pytest.raises(ConfigError, match="'tar', allowed: mult, mstr"):
        spec("tar")


def test_added_streams_outlive_a_time_without_mstr(
    made: dict[tuple[str, ...], DatasetStore], tmp_path: Path, dagster_home: Path
) -> None:
    """Without `mstr` added streams are set aside, `run` and `status` say so, and `clean` keeps their files."""
    both = changed(made[FORMATS], tmp_path, *FORMATS)
    with mm_assets.open(both.store.url_of("manifest.json"), format="mstr") as data:
        numbers = {sample_id: float(number) for number, sample_id in enumerate(data.sample_ids)}
    list(add_to_dataset(both, "score", ScalarField(dtype="float32"), values_of(numbers)))
    manifest = manifests.build_manifest(both).manifest
    before = {key: marker_of(both, key)["added"] for key in "st"}
    given = ["--shards", both.spec.shards, "--root", both.spec.root, "--dataset", "data", "--set", "pack=generic"]
    done = CliRunner().invoke(main, ["run", *given, "--set", "formats=[mult]", "--set", "settle_seconds=0"])
    assert done.exit_code == 0, done.output
    said = (
        "data: stream 'score' is set aside in s, t: it was added to MSTR files, which `formats` leaves out; add `mstr`"
    )
    assert said in done.stderr
    done = CliRunner().invoke(main, ["status", *given, "--set", "formats=[mult]", "--set", "settle_seconds=0"])
    assert said in done.stdout
    one = DatasetStore(both.spec.replace(formats=("mult",)))
    report = manifests.build_manifest(one)
    assert "added_streams" not in report.manifest
    assert report.missing_streams == {}
    made_now = published_result(one.spec, marker_of(one, "s")).metadata or {}
    assert made_now["streams_set_aside"] == "score"
    clean.clean(one, keep=1)
    assert run(both) == ["packed_mstr"]
    assert {key: marker_of(both, key)["added"] for key in "st"} == before
    again = manifests.build_manifest(both)
    assert again.manifest == manifest
    with mm_assets.open(again.url, format="mstr") as data:
        assert data.verify().ok
        assert data.read_modality("score", range(len(data))) == [numbers[key] for key in data.sample_ids]


def test_streams_of_other_mstr_files_are_lost(made: dict[tuple[str, ...], DatasetStore], tmp_path: Path) -> None:
    """Where the MSTR file that is made again is another one, the streams set aside are lost, and the marker says so."""
    both = changed(made[FORMATS], tmp_path, *FORMATS)
    with mm_assets.open(both.store.url_of("manifest.json"), format="mstr") as data:
        numbers = dict.fromkeys(data.sample_ids, 1.0)
    list(add_to_dataset(both, "score", ScalarField(dtype="float32"), values_of(numbers)))
    before = marker_of(both, "s")["added"]
    run(DatasetStore(both.spec.replace(formats=("mult",))))
    fewer = [{"type": "text_length", "min_chars": 7}]  # drops nothing in `s`
    for formats in (("mult",), FORMATS):
        other = DatasetStore(both.spec.replace(formats=formats, filters=fewer))
        run(other)
    assert [marker_of(other, key).get("lost_streams") for key in "st"] == [None, ["score"]]
    assert [marker_of(other, key).get("added") for key in "st"] == [before, None]
    assert manifests.build_manifest(other).missing_streams == {"score": ("t",)}
