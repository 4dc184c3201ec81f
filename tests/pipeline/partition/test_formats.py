"""`formats`: a dataset that is packed in one format, and what another list of formats makes stale."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mm_assets
from mm_assets.cli.main import main
from mm_assets.errors import ConfigError
from mm_assets.fields import ScalarField
from mm_assets.orchestration.build import build_definitions
from mm_assets.pipeline.chain import RECORDED_STAGES, recorded_stages, summary_numbers
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state import clean, manifests
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.staleness import DatasetState, pending_partitions, stale_partitions

from ..chain import add_stream, declare, let_a_day_go_by, record_of, run_chain, run_once, stages_of
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
        report = run_once(dataset.spec, dataset.partition(key), dataset.schema())
        assert report.ok, report.failure
        ran.append(list(report.results))
    return ran[0]


@pytest.mark.parametrize("form", FORMATS)
def test_one_format_is_what_both_hold_of_it(made: dict[tuple[str, ...], DatasetStore], form: str) -> None:
    """A dataset of one format has that file alone in record and manifest, with the same bytes as beside the other."""
    one, both = made[form,], made[FORMATS]
    packed = {name: content for name, content in contents(both, "packed").items() if name.endswith(form)}
    assert contents(one, "packed") == packed
    record = record_of(one, "s")
    assert record is not None
    assert list(record.packed) == [form]
    manifest = manifests.build_manifest(one).manifest
    assert list(manifest["partitions"]["packed"]) == [form]
    assert manifest["duplicate_ids"] == manifests.build_manifest(both).manifest["duplicate_ids"]
    assert manifest["duplicate_ids"]["count"] == 1
    assert f"packed_{other(form)}" not in {stage.name for stage in stages_of(one, "s")}


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
    for stale in stale_partitions(DatasetState(dataset), pending_partitions(dataset)).values():
        assert (stale.first.name, stale.message) == (stage, f"{stage} has not been made")
    assert run(dataset) == [stage]
    assert manifests.build_manifest(dataset).left_out == {}
    for folder in ("packed", "filtered_rows"):
        assert contents(dataset, folder) == contents(made[FORMATS], folder)
    assert contents(dataset, "records").items() > contents(made[FORMATS], "records").items()
    assert dataset.store.read_bytes("manifest.json") == made[FORMATS].store.read_bytes("manifest.json")


@pytest.mark.parametrize("form", FORMATS)
def test_a_format_that_is_removed_runs_no_stage(
    made: dict[tuple[str, ...], DatasetStore], tmp_path: Path, form: str
) -> None:
    """A shorter list makes records and a manifest, and a day later cleaning deletes what no kept manifest names."""
    dataset = changed(made[FORMATS], tmp_path, form)
    stale = stale_partitions(DatasetState(dataset), pending_partitions(dataset))
    assert [found.first.name for found in stale.values()] == ["published", "published"]
    assert run(dataset) == []
    assert manifests.build_manifest(dataset).left_out == {}
    assert dataset.store.read_bytes("manifest.json") == made[form,].store.read_bytes("manifest.json")
    let_a_day_go_by(dataset)
    assert not [name for name in clean.clean(dataset).files if name.startswith("packed/")]
    assert not [name for name in clean.clean(dataset, keep=1).files if name.startswith("packed/")]
    let_a_day_go_by(dataset)
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


@pytest.mark.parametrize("form", FORMATS)
def test_added_streams_outlive_a_change_of_formats(
    made: dict[tuple[str, ...], DatasetStore], tmp_path: Path, form: str
) -> None:
    """Streams are read beside either format: with one format less, and with both again, they are those of before."""
    both = changed(made[FORMATS], tmp_path, *FORMATS)
    with mm_assets.open(both.store.url_of("manifest.json")) as data:
        numbers = {sample_id: float(number) for number, sample_id in enumerate(data.sample_ids)}
    _, before = add_stream(both, "score", ScalarField(dtype="float32"), numbers)
    one = DatasetStore(both.spec.replace(formats=(form,)))
    for dataset in (one, both):
        for key in pending_partitions(dataset):
            assert run_once(dataset.spec, dataset.partition(key), dataset.schema()).ok
        report = manifests.build_manifest(dataset)
        assert report.missing_streams == {}
        with mm_assets.open(report.url) as data:
            assert data.verify().ok
            assert data.read_modality("score", range(len(data))) == [numbers[key] for key in data.sample_ids]
    assert report.digest == before.digest


def test_a_partition_that_gets_other_samples_lacks_its_streams(
    made: dict[tuple[str, ...], DatasetStore], tmp_path: Path
) -> None:
    """A filter that drops samples of one partition leaves the other one's stream, and `run` and `status` say so."""
    both = changed(made[FORMATS], tmp_path, *FORMATS)
    with mm_assets.open(both.store.url_of("manifest.json")) as data:
        add_stream(both, "score", ScalarField(dtype="float32"), dict.fromkeys(data.sample_ids, 1.0))
    fewer = [{"type": "text_length", "min_chars": 7}]  # drops nothing in `s`
    given = ["--shards", both.spec.shards, "--root", both.spec.root, "--dataset", "data", "--set", "pack=generic"]
    given += ["--set", f"filters={json.dumps(fewer)}", "--set", "settle_seconds=0"]
    line = "data: readers do not see the stream 'score': it is missing in t; add it with `mm-assets add-stream"
    for command in ("run", "status"):
        done = CliRunner().invoke(main, [command, *given], env={"DAGSTER_HOME": str(tmp_path)})
        assert done.exit_code == 0, done.output
        assert line in done.stderr
    dataset = DatasetStore(both.spec.replace(filters=fewer))
    assert manifests.build_manifest(dataset).missing_streams == {"score": ("t",)}
    assert len(dataset.store.sizes("streams")) == 2
