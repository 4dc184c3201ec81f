"""What commands write: names and ids come from shards and cannot control the terminal."""

import pytest

from mm_assets.cli.output import echo, printable


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
