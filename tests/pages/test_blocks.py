"""Code blocks of all pages, also of those that no test runs: they are Python, YAML or TOML, and commands exist."""

import re
import tomllib
from pathlib import Path
from textwrap import indent

import click
import pytest
import yaml

from mm_assets.cli.main import main

from .blocks import REPOSITORY, commands_of

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/**/*.md")
    for page in REPOSITORY.glob(pattern)
)


def blocks(page: Path, *languages: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_blocks_are_what_they_say(page: Path) -> None:
    """Each Python block compiles, each YAML and TOML block is read, each command of `mm-assets` and make exists."""
    for code in blocks(page, "python") if page.parent.name != "reference" else ():  # there they are signatures
        is_body = re.search(r"^return\b", code, flags=re.MULTILINE)
        compile(f"def shown():\n{indent(code, '    ')}" if is_body else code, str(page), "exec")
    for code in blocks(page, "yaml"):
        list(yaml.safe_load_all(code))
    for code in blocks(page, "toml"):
        tomllib.loads(code)
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for code in blocks(page, "", "sh", "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            if not re.match(r"(mm-assets|make) ", line):
                continue
            ((words, _),) = commands_of(line)
            if words[0] == "make":
                assert words[1] in targets, line
            else:
                parse(words)


def parse(words: list[str]) -> None:
    """Parses a command; what stands for a file need not exist."""
    command = main.get_command(click.Context(main, info_name="mm-assets"), words[1])
    assert command is not None, words
    try:
        command.make_context(words[1], words[2:])
    except click.BadParameter as error:
        if "does not exist" not in error.message:
            raise
