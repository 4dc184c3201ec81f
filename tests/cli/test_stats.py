"""`mm-assets stats`: the numbers of a published dataset, as tables, plots and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mm_assets.cli.main import main
from mm_assets.cli.plots import histogram_lines, number_text

from ..pipeline.chain import declare, run_chain
from ..pipeline.shards import make_shard, png


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset `data` of two partitions in `root`: captions and images of two sizes, one dropped."""
    folder = tmp_path_factory.mktemp("stats")
    for name, size in (("a", (8, 12)), ("b", (20, 30))):
        members: dict[str, object] = {}
        for number in range(6):
            members |= {f"{name}{number}.png": png(number, size), f"{name}{number}.txt": "x" * (number + 1)}
        make_shard(folder / "in" / f"{name}.tar", members)
    run_chain(declare(folder / "root", folder / "in", filters=[{"type": "text_length", "min_chars": 2}]))
    return folder


def stats(made: Path, *options: str, **environment: str) -> Result:
    given = ["stats", "--root", str(made / "root"), "-d", "data", *options]
    result = CliRunner().invoke(main, given, env=environment)
    assert result.exit_code == 0, result.output
    return result


def found(made: Path) -> Any:
    return json.loads(stats(made, "--json").stdout)["datasets"]["data"]


def test_numbers_are_those_of_the_samples(made: Path) -> None:
    """Samples, rows, sizes of images and lengths of texts are counted exactly, and drops by filter."""
    numbers = found(made)
    assert (numbers["num_partitions"], numbers["num_samples"]) == (2, 12)
    assert numbers["rows"] == {"image": 12, "metadata": 12, "text": 10}
    width = numbers["modalities"]["image"]["distributions"]["width"]
    assert (width["unit"], width["count"], width["low"], width["median"], width["high"]) == ("pixels", 12, 12, 21, 30)
    assert sum(width["bins"]) == 12
    length = numbers["texts"]["text"]
    assert (length["count"], length["low"], length["median"], length["mean"], length["high"]) == (10, 2, 4, 4, 6)
    assert [(t["reason"], t["count"]) for t in numbers["losses"]] == [("text_length.chars_below_min", 2)]
    packed = made / "root" / "data" / "packed"
    for form, size in numbers["num_bytes"].items():
        assert size == sum(path.stat().st_size for path in packed.glob(f"*.{form}"))


def test_no_media_is_read(made: Path, tmp_path: Path) -> None:
    """The numbers are the same where the shards and the tables with the media are gone."""
    before = found(made)
    shutil.copytree(made / "root", tmp_path / "root")
    shutil.rmtree(tmp_path / "root" / "data" / "materialized_rows")
    after = found(tmp_path)
    assert {**after, "url": None} == {**before, "url": None}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_and_plots_fit_the_terminal(made: Path, columns: int) -> None:
    """No line is wider than the terminal, with blocks as bars; in a pipe bars are number signs."""
    said = click.unstyle(stats(made, TTY_COMPATIBLE="1", TERM="xterm", COLUMNS=str(columns)).stdout)
    _, *lines = said.splitlines()  # the first is a sentence
    assert max(map(len, lines)) <= columns
    assert "█" in said
    assert "text rows, length (characters):" in said
    piped = stats(made).stdout
    assert "█" not in piped
    assert "  #" in piped
    assert "data: 12 samples in 2 partitions, " in piped
    assert "\n2 dropped by filters, 0 lost\n" in piped
    assert "#" not in stats(made, "--no-plots").stdout


def test_without_a_manifest_the_command_is_named(made: Path, tmp_path: Path) -> None:
    """Before the first manifest the error says which command makes it."""
    shutil.copytree(made / "root", tmp_path / "root")
    (tmp_path / "root" / "data" / "manifest.json").unlink()
    result = CliRunner().invoke(main, ["stats", "--root", str(tmp_path / "root"), "-d", "data"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "there is no manifest yet: `mm-assets run --root " in result.stderr


def test_a_dataset_of_which_nothing_is_published(tmp_path: Path) -> None:
    """A manifest without partitions has numbers too: none, although no run has made the tables."""
    make_shard(tmp_path / "in" / "a.tar", {"0.json": {"n": 1}})
    run = ["run", str(tmp_path / "in"), "-d", "data", "--root", str(tmp_path / "root")]
    failed = CliRunner().invoke(main, run)
    assert failed.exit_code == 1
    assert "none of its 1 sample has content" in failed.output
    numbers = found(tmp_path)
    assert (numbers["num_partitions"], numbers["num_samples"], numbers["rows"]) == (0, 0, {})


def test_bars_are_in_proportion() -> None:
    """The largest bin has the longest bar, a small one is seen, and an empty one has none."""
    lines = list(histogram_lines([0, 1, 2.5, 10], [1000, 1, 0], width=None))
    assert [line.count("#") for line in lines] == [40, 1, 0]
    assert lines[1].split() == ["1", "–", "2.5", "1", "#"]
    (first, *_) = histogram_lines([0, 1, 2], [16, 8], width=40)
    assert first.endswith("█" * 27)
    assert [number_text(n) for n in (3, 1234567.0, 0.12345, 1234.5)] == ["3", "1,234,567", "0.123", "1,234"]
