"""The prose check finds the phrases of its list, names their lines, and ignores code."""

import re
from pathlib import Path

import pytest

from .prose import findings

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_phrase_of_the_word_list_is_found(tmp_path: Path) -> None:
    """Each phrase that the table of CONTRIBUTING.md rules out is a finding."""
    page = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page.split("| not | but |\n")[1].split("\n\n")[0]
    phrases = [phrase for row in table.splitlines()[1:] for phrase in re.findall(r"`(.+?)`", row.split(" | ")[0])]
    assert len(phrases) > 10
    sheet = tmp_path / "page.md"
    sheet.write_text("".join(f"It {phrase} it.\n" for phrase in phrases), encoding="utf-8")
    assert {line for line, _, _ in findings(sheet)} == set(range(1, len(phrases) + 1))


def test_code_in_markdown_is_passed_over(tmp_path: Path) -> None:
    """Blocks and inline code are not prose; a phrase may span two lines."""
    sheet = tmp_path / "page.md"
    sheet.write_text("`dear`\n\n```\ndear\n```\n\nSuch a table stands\nin the file.\n", encoding="utf-8")
    assert findings(sheet) == [(7, "stands in", "is at, is in")]


def test_python_is_read_for_its_strings_and_comments(tmp_path: Path) -> None:
    """Docstrings, comments over several lines and messages are prose; names are not."""
    module = tmp_path / "module.py"
    code = '"""First.\n\nThis is dear.\n"""\n\nx = dear = 1  # this is handed\n# out again\n'
    module.write_text(code + 'raise ValueError(f"{x} is no image")\n', encoding="utf-8")
    assert [(line, phrase) for line, phrase, _ in findings(module)] == [
        (3, "dear"),
        (6, "handed out"),
        (8, "is no image"),
    ]


@pytest.mark.parametrize("text", ["There is no image.", "It is no longer there.", "It stands in for another one."])
def test_idiomatic_phrases_pass(tmp_path: Path, text: str) -> None:
    """Phrases that resemble those of the list, and are good English, are not findings."""
    sheet = tmp_path / "page.md"
    sheet.write_text(text, encoding="utf-8")
    assert findings(sheet) == []
