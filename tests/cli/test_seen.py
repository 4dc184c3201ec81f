"""`mm-assets seen`: queries over the samples that a run has seen, out of a state in a checkpoint."""

import csv
import io
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import mm_assets
from mm_assets import Blocks, MultimodalLoader
from mm_assets.cli.main import main
from mm_assets.cli.seen import MAX_STATE_BYTES
from mm_assets.fields import ScalarField

RECIPE = """
unit: sample
defaults: {batch_size: 4}
sources:
  a: {dataset: a.mult, epochs: 1}
  b: {dataset: b.mult, epochs: 2}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two files, a recipe of them, and the states of a run on two ranks and of a loader."""
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 20), ("b", 6)):
        with mm_assets.create(f"{name}.mult", {"x": ScalarField("int32")}, fsync=False) as writer:
            for i in range(size):
                writer.write(f"{name}{i}", {"x": i})
    Path("recipe.yaml").write_text(RECIPE)
    with mm_assets.mix("recipe.yaml", rank=0, world_size=2) as mixed:
        list(mixed)
        Path("epoch.json").write_text(json.dumps(mixed.state_dict()))
        list(islice(mixed, 2))
        Path("state.json").write_text(json.dumps(mixed.state_dict()))
    with mm_assets.open("a.mult") as data:
        loader = MultimodalLoader(data.filter("x.value >= 5"), batch_size=2, shuffle=Blocks(4, 2), seed=3)
        list(islice(loader, 4))
        Path("loader.json").write_text(json.dumps(loader.state_dict()))
    return tmp_path


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["seen", *arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def rows(*arguments: str) -> list[list[Any]]:
    document = json.loads(invoke(*arguments, "--json").stdout)
    found: list[list[Any]] = document["rows"]
    return found


def test_a_mix_is_summed_up_by_source(place: Path) -> None:
    """Without a query, it says how many samples of each source were seen and how often."""
    found = list(csv.DictReader(io.StringIO(invoke("epoch.json", "--recipe", "recipe.yaml").stdout)))
    assert found == [
        {"source": "a", "samples": "20", "seen": "20", "times": "20", "least": "1", "most": "1"},
        {"source": "b", "samples": "6", "seen": "6", "times": "12", "least": "2", "most": "2"},
    ]


def test_a_query_sees_every_delivery(place: Path) -> None:
    """Deliveries have ids and ranks; a rank's are its own; those between two states are what the later one adds."""
    given = ("--recipe", "recipe.yaml", "--world-size", "2")
    by_rank = dict(rows("state.json", "select rank, count(*) from seen group by 1", *given))
    assert by_rank == {0: 24, 1: 24}
    assert rows("state.json", "select count(*), sum(times_seen) from samples", *given, "--rank", "1") == [[26, 24]]
    since = ("--since", "epoch.json")
    assert rows("state.json", "select count(*), min(mix_position) from seen", *given, *since) == [[16, 32]]
    (first,) = rows(
        "epoch.json", "select sample_id, index, position, epoch, rank from seen order by mix_position", *given
    )[:1]
    assert first[0][1:] == str(first[1])
    assert rows("state.json", "select distinct rank from seen", "--recipe", "recipe.yaml") == [[None]]


def test_a_loader_of_a_view(place: Path) -> None:
    """The order of a plain loader is in its state; the view of the dataset is an option."""
    given = ("--dataset", "a.mult", "--where", "x.value >= 5", "--batch-size", "2")
    assert rows("loader.json", "select source, count(*) from seen group by all", *given) == [["a.mult", 8]]
    unseen = rows("loader.json", "select sample_id from samples where times_seen = 0 order by index", *given)
    assert len(unseen) == 7
    assert "another dataset" in invoke("loader.json", "--dataset", "a.mult", code=1).stderr


def test_partitions_are_those_of_the_manifest(tmp_path: Path) -> None:
    """A dataset with a manifest has the partition of each sample, of a view too."""
    with mm_assets.create(tmp_path / "set", {"x": ScalarField("int32")}, shard_samples=4, fsync=False) as writer:
        for i in range(10):
            writer.write(str(i), {"x": i})
    with mm_assets.open(tmp_path / "set") as data:
        view = data.filter("x.value % 2 = 1")
        assert data.manifest is not None
        keys = [file.partition for file in data.manifest.files]
        (tmp_path / "state.json").write_text(json.dumps(MultimodalLoader(view).state_dict()))
    arguments = ("--dataset", str(tmp_path / "set"), "--where", "x.value % 2 = 1")
    found = rows(str(tmp_path / "state.json"), "select sample_id, partition from samples order by index", *arguments)
    assert found == [[str(i), keys[i // 4]] for i in range(1, 10, 2)]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("state.json",), "--recipe, --dataset: expected one of them", 2),
        (("state.json", "--recipe", "recipe.yaml", "--dataset", "a.mult"), "expected one of them", 2),
        (("state.json", "--dataset", "a.mult"), "STATE is that of a mix: give its --recipe", 2),
        (("loader.json", "--recipe", "recipe.yaml"), "this is not a mix's state: it has no recipe", 1),
        (("state.json", "--recipe", "recipe.yaml", "--rank", "0"), "--rank: found 0, expected a number below", 2),
        (("state.json", "select", "--recipe", "recipe.yaml"), "QUERY: Parser Error", 2),
        (("state.json", " ", "--recipe", "recipe.yaml"), "QUERY: found ' ', expected SQL", 2),
        (("state.json", "--recipe", "recipe.yaml", "--csv", "--json"), "give one of them", 2),
        (("none.json", "--recipe", "recipe.yaml"), "none.json: No such file", 1),
        (("recipe.yaml", "--recipe", "recipe.yaml"), "recipe.yaml: is not JSON, expected a loader's state", 1),
        (("list.json", "--recipe", "recipe.yaml"), "list.json: expected a loader's state, a JSON object", 1),
        (("large.json", "--recipe", "recipe.yaml"), "large.json: found more than", 1),
    ],
)
def test_wrong_uses_are_refused(place: Path, arguments: tuple[str, ...], message: str, code: int) -> None:
    """The message says which option or file is wrong and what was expected."""
    Path("list.json").write_text("[]")
    with Path("large.json").open("wb") as file:
        file.truncate(MAX_STATE_BYTES + 1)
    assert message in invoke(*arguments, code=code).stderr
