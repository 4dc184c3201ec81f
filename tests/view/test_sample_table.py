"""Sorting and filtering the grid by what packed files hold: values, conditions, pages, faults, and what is scanned."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import mm_assets
from mm_assets import Dataset
from mm_assets.errors import SourceError
from mm_assets.fields import ImageField, ScalarField, TextField
from mm_assets.view import sample_table
from mm_assets.view.sample_table import SampleTable

Open = Callable[..., TestClient]


@pytest.fixture(params=["mult", "mstr"])
def scored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Twelve samples with a score each, of which every third has a picture and one has no score."""
    path = tmp_path / f"scored.{request.param}"
    fields = {
        "image": ImageField(encoding="png"),
        "text": TextField(),
        "score": ScalarField(),
        "label": ScalarField(dtype="int8"),
    }
    with mm_assets.create(path, fields) as writer:
        for n in range(12):
            image = np.zeros((4, 8 + n, 3), np.uint8) if n % 3 == 0 else None
            score = None if n == 5 else (n * 5 % 12) / 12
            writer.write(f"id-{n:02}", {"image": image, "text": "x" * n, "score": score, "label": n % 2})
    return path


def select(client: TestClient, **query: object) -> dict:
    answer = client.get("/api/select", params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_columns_are_those_of_a_filter(scored: Path, view: Open) -> None:
    """Presence, sizes and the numbers of metadata records are columns with their types."""
    (found,) = view(scored).get("/api/columns").json()["relations"]
    columns = dict(found["columns"])
    assert found["name"] == "samples"
    assert columns["score.value"] == "float64"
    assert columns["sample_id"] == "string"
    assert columns["present_image"] == "bool"
    assert {"index", "size_text", "image.width", "label.value"} <= set(columns)


def test_samples_are_sorted_by_a_score(scored: Path, view: Open) -> None:
    """The largest come first, a page begins where the last one ended, and a sample without the score is left out."""
    client = view(scored)
    best = sorted((n for n in range(12) if n != 5), key=lambda n: -(n * 5 % 12))
    first = select(client, order="score.value", direction="desc", limit=4)
    assert [entry["index"] for entry in first["entries"]] == best[:4]
    assert [row["value"] for row in first["rows"]] == [(n * 5 % 12) / 12 for n in best[:4]]
    rest = select(client, order="score.value", direction="desc", limit=50, offset=first["next"])
    assert [entry["index"] for entry in rest["entries"]] == best[4:]
    assert rest["next"] is None


def test_samples_are_filtered_by_what_filter_takes(scored: Path, view: Open) -> None:
    """A condition chooses what `Dataset.filter` does, in the samples' own order, with cards that have pictures."""
    client = view(scored)
    with mm_assets.open(scored) as dataset:
        for where in ("image.width >= 11 and present_text", "sample_id like '%1'", "label.value = 1 or size_text > 9"):
            found = select(client, where=where)
            assert [entry["index"] for entry in found["entries"]] == list(dataset.filter(where).selection)
    (card,) = select(client, where="image.width = 8")["entries"]
    assert client.get(card["picture"]).headers["content-type"] == "image/jpeg"


def test_values_that_json_lacks_are_sorted(tmp_path: Path, view: Open) -> None:
    """NaN and infinities are values of a score."""
    path = tmp_path / "odd.mstr"
    with mm_assets.create(path, {"score": ScalarField()}) as writer:
        for n, value in enumerate((1.0, math.nan, -math.inf)):
            writer.write(f"id-{n}", {"score": value})
    found = select(view(path), order="score.value")
    assert [entry["index"] for entry in found["entries"]] == [2, 0, 1]


def test_several_files_are_one_table(tmp_path: Path, view: Open) -> None:
    """Samples are numbered through all files of a folder."""
    for name, values in {"a": (3, 1), "b": (2, 4)}.items():
        with mm_assets.create(tmp_path / f"{name}.mstr", {"score": ScalarField()}) as writer:
            for n, value in enumerate(values):
                writer.write(f"{name}{n}", {"score": value})
    found = select(view(tmp_path), order="score.value")
    assert [entry["id"] for entry in found["entries"]] == ["a1", "b0", "a0", "b1"]


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("no_such > 1", 'column "no_such" not found'),
        ("index in (select 1 from read_text('/etc/passwd'))", "read_text"),
        ("true) union select 1, 2 --", ""),
        ("true) union all select 'x', null from samples where (true", "not a condition"),
        ("index in (select 1 from read_parquet('/dev/fd/0'))", "read_parquet"),
    ],
)
def test_a_wrong_condition_is_an_answer(scored: Path, view: Open, where: str, says: str) -> None:
    """An unknown column is said with those that there are, and no condition reads anything else."""
    found = select(view(scored), where=where)
    assert says in found["error"]
    assert "entries" not in found
    if "no_such" in where:
        assert "score.value" in found["error"]
        assert (found["line"], found["column"]) == (1, 1)


def test_wrong_parameters_of_a_selection_are_refused(scored: Path, view: Open) -> None:
    """An unknown column, an unknown direction, and an offset below 0 are errors of the request."""
    client = view(scored)
    for query in ({"order": 'score"; drop'}, {"order": "index", "direction": "up"}, {"offset": "-1"}):
        assert client.get("/api/select", params=query).status_code in (400, 422), query


def test_a_shard_has_no_columns(tmp_path: Path, view: Open, packed: Path) -> None:
    """A list of JSON says so, and its page has no control."""
    table = tmp_path / "list.jsonl"
    table.write_text('{"a": 1}\n')
    client = view(table)
    assert client.get("/api/explore").json() == {"available": False, "has_columns": False}


def test_only_columns_that_are_named_are_scanned(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question scans what it names, once; one that names less asks the same file."""
    scanned: list[list[str]] = []
    scan = Dataset.scan_columns

    def noting(dataset: Dataset, names: list[str]) -> object:
        scanned.append(sorted(names))
        return scan(dataset, names)

    monkeypatch.setattr(Dataset, "scan_columns", noting)
    with mm_assets.open(scored) as dataset:
        table = SampleTable(dataset)
        assert len(table.select("Size_Text > 3", "score.value", "asc", 0, 50).rows) == 7
        assert len(table.select("", "score.value", "asc", 0, 50).rows) == 11
        table.close()
    assert scanned == [["index", "score", "size_text"]]


def test_a_scan_that_takes_too_long_says_so(scored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its time a question ends with how far it came."""
    monkeypatch.setattr(sample_table, "SCAN_SECONDS", -1.0)
    with mm_assets.open(scored) as dataset:
        blocks = [block.slice(start, 6) for block in dataset.scan_columns(["index"]) for start in (0, 6)]
        monkeypatch.setattr(Dataset, "scan_columns", lambda *_: iter(blocks))
        table = SampleTable(dataset)
        with pytest.raises(SourceError, match="6 of 12 samples"):
            table.select("", "index", "asc", 0, 5)
        table.close()
