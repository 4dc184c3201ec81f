"""What commands write: names and ids come from shards and cannot control the terminal."""

from pathlib import Path

import click
import pytest

from mm_assets.cli.options import DatasetChoice
from mm_assets.cli.output import echo, printable, report_faults, report_losses, report_registration
from mm_assets.pipeline.chain import RAW_SHARDS
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.losses import Loss, LossTotal
from mm_assets.pipeline.state.records import Partition
from mm_assets.pipeline.state.registration import Registration, register
from mm_assets.pipeline.state.staleness import Stale

from ..pipeline.chain import declare
from ..pipeline.shards import CAPTIONS, make_shard


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name-0.tar", "plain name-0.tar"),
        ("größe 大きさ 🙂", "größe 大きさ 🙂"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("done\rFAILED\nline\ttab\x08", r"done\rFAILED\nline\ttab\x08"),
        ("\x9b31m", r"\x9b31m"),
        ("a\u202egnp.exe\u2066", r"a\u202egnp.exe\u2066"),
        ("\u2028\U000e0001", r"\u2028\U000e0001"),
        ("\udc80.tar", r"\udc80.tar"),
    ],
)
def test_control_characters_are_shown_escaped(capsys: pytest.CaptureFixture[str], text: str, shown: str) -> None:
    """Escapes, line breaks, direction marks and lone surrogates are shown as their codes, in one line; letters stay."""
    assert printable(text) == shown
    echo(f"{text}: lost")
    echo(text, err=True)
    assert capsys.readouterr() == (f"{shown}: lost\n", f"{shown}\n")


def test_a_registration_names_what_is_odd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second kind of sample is said with its number when the layout is decided, with the command, and not again."""
    make_shard(tmp_path / "in" / "a.tar", {**CAPTIONS, "4.png": CAPTIONS["0.png"], "README": "read me"})
    dataset = DatasetStore(declare(tmp_path / "root", tmp_path / "in"))
    chosen = DatasetChoice(root="r")
    report_registration(chosen, dataset.spec, register(dataset))
    note, command = capsys.readouterr().err.splitlines()
    assert note.startswith("data: 1 of 6 sampled samples consist of binary and decided nothing; binary would be ")
    assert command == "data: `mm-assets plan --root r --dataset data` shows how the layout was decided"
    report_registration(chosen, dataset.spec, register(dataset))
    assert capsys.readouterr() == ("", "")


def test_a_registration_warns_of_slow_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than 2,000 partitions with results of their own are reported to make Dagster's pages slow."""

    def said(number: int, **settings: str) -> str:
        keys = [Partition(key=f"p{i}", shards=()) for i in range(number)]
        found = Registration(partitions=tuple(keys), added=(), changed=(), removed=(), unsettled=(), seen={})
        report_registration(DatasetChoice(root="r"), declare(tmp_path, tmp_path, **settings), found)
        return capsys.readouterr().err

    assert said(2000, checks="grouped") == ""
    assert said(2001, checks="grouped").startswith("data: 2,001 partitions make Dagster's pages slow: ")
    assert said(2001, checks="per_rule").endswith("leave `checks` out\n")
    assert said(2001, checks="rollup") == said(2001) == ""


def test_a_table_that_fits_without_lines_is_not_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns each group of pending partitions has one line; in more the table has lines, too."""
    stale = {f"speech-0000{number}": Stale(first=RAW_SHARDS, reason="it has never run") for number in range(3)}
    for name, value in (("TTY_COMPATIBLE", "1"), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    row = "raw_shards it has never run 3 speech-00000, speech-00001, speech-00002"
    for columns, has_lines in (("84", False), ("100", True)):
        monkeypatch.setenv("COLUMNS", columns)
        report_faults(stale)
        said = click.unstyle(capsys.readouterr().out)
        assert row in " ".join(said.replace("│", " ").split())
        assert (len(said.splitlines()), "│" in said) == ((5, True) if has_lines else (2, False))


LOSS = Loss(
    partition="web-00017", stage="raw_shards", reason="failed", detail="its member is truncated", shard="in/w.tar"
)


@pytest.mark.parametrize("columns", [60, 80, 120, None])
def test_a_table_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    """The table of losses fits a narrow terminal and a pipe; each reason has its first item in lines of its own."""
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if columns is not None:
        for name, value in (("TTY_COMPATIBLE", "1"), ("TERM", "xterm"), ("COLUMNS", str(columns))):
            monkeypatch.setenv(name, value)
    report_losses(DatasetChoice(root="r"), "data", [LossTotal(count=1, example=LOSS)])
    said = click.unstyle(capsys.readouterr().out)
    assert said.startswith("data: 1 partition failed\n"), "without an item, none is counted"
    lines = said.splitlines()
    table = [line for line in lines if line.startswith(("┏", "┃", "┡", "│", "└"))]
    assert max(map(len, table)) <= 60, "it fits a pipe, too"
    if columns is None:
        assert "failed: the first is web-00017: in/w.tar: its member is truncated" in lines
        assert f"  what to do: {LOSS.advice}" in lines
    words = {word.strip("│,") for line in lines for word in line.split()}
    for word in f"web-00017: in/w.tar: {LOSS.detail} {LOSS.advice} kind lost stage raw_shards reason failed".split():
        assert word.strip(",") in words
