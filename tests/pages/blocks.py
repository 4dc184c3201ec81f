"""Runs the code blocks of a page in order, as its reader would.

| block | what happens |
| --- | --- |
| `python` | it is executed; the names of the blocks before it are there |
| `python title="x.py"`, `yaml title="x.yaml"` and others with a title | it is written to this file |
| `yaml` | a dataset's declaration, or some of its keys, must pass the check of declarations |
| `sh` | each command runs: `mm-assets` and `cd` here, `SHELL` and `python` in a shell; `# exit code 1` must be right |
| `sh` after `<!-- parsed, not run -->` | `mm-assets` commands are parsed: they need what a test does not have |
| `text` | each of its lines is in the output of the block before it, whatever the white space |

Commands that need a network, a cluster or minutes are in `NOT_RUN`, with the reason and what is checked instead. A
reader notes each command that it does not run.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from mm_assets.cli.main import main
from mm_assets.pipeline.spec import DatasetSpec

REPOSITORY = Path(__file__).resolve().parents[2]

SHELL = ("cp", "du", "ls", "mkdir", "mv", "rm", "tar")


def _make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert words[1] in targets, words


def _options(words: list[str]) -> None:
    """Parses an `mm-assets` command without running it."""
    command = main.get_command(click.Context(main), words[1])
    assert command is not None, words
    command.make_context(words[1], words[2:])


def _nothing(words: list[str]) -> None:
    """Another program's own command."""


def _extras(words: list[str]) -> None:
    """An extra of the project that `pip` shall install is one."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for found in re.findall(r"mm-assets\[([^\]]*)\]", " ".join(words)):
        assert set(found.split(",")) <= set(extras), words


NOT_RUN: Mapping[str, tuple[str, Callable[[list[str]], None]]] = {
    "make": ("installs packages, or takes minutes; CI runs it", _make),
    "pip": ("asks a package index", _extras),
    "hf": ("asks the Hugging Face Hub", _nothing),
    ".": ("activates an environment, which the test has", _nothing),
    "torchrun": ("starts processes that need torch", _nothing),
    "dagster": ("starts a service", _nothing),
    "dg": ("takes seconds; `make check` and tests/e2e/test_dg.py run it", _nothing),
}
"""What a command of a page is not run for, by its first word: the reason, and the check in place of it."""

PARSED = "needs what a test does not have"
"""The reason of `mm-assets` commands in a block that is only parsed."""

SERVERS = ("ui", "view")
ENDLESS = "runs until it is interrupted"
"""The reason of the commands in `SERVERS`."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    title: str | None
    is_parsed: bool
    code: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for parsed, language, title, code in re.findall(
        r'^(<!-- parsed, not run -->\n\n)?```(\w+)(?: title="([^"]+)")?\n(.*?)^```',
        text,
        flags=re.MULTILINE | re.DOTALL,
    ):
        yield Block(language, title or None, bool(parsed), code)


def commands_of(code: str) -> Iterator[tuple[list[str], int]]:
    """Yield the commands of a shell block as words, without comments, with the exit code that is expected.

    Commands joined by `&&` are several; what runs in the background is a command as others.
    """
    for line in code.replace("\\\n", " ").splitlines():
        code_said = re.search(r"# exit code (\d+)$", line)
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", "&"):
                words.append(word)
            elif words:
                yield words, int(code_said[1]) if code_said else 0
                words = []


def _in_shell(line: str, where: str) -> str:
    """What a line of the shell prints."""
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (where, line, done.stderr)
    return done.stdout


@dataclass
class Reader:
    """Follows a page in the current folder.

    Attributes:
        page: what is followed.
        monkeypatch: for the current folder, variables and the import path; undone by the test.
        not_run: the programs of commands that were not run, with the reason.
        before_cleanup: is called before the page removes what it made.
    """

    page: Path
    monkeypatch: pytest.MonkeyPatch
    space: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    not_run: list[tuple[str, str]] = field(default_factory=list)
    before_cleanup: Callable[[], None] = lambda: None

    def follow(self) -> None:
        """Run every block of the page."""
        for number, block in enumerate(blocks_of(self.page)):
            where = f"{self.page.name}, block {number}"
            if block.title is not None:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.code, encoding="utf-8")
            getattr(self, f"_{block.language}")(block, where)

    def _python(self, block: Block, where: str) -> None:
        if block.title is not None:
            compile(block.code, where, "exec")
            return
        captured = io.StringIO()
        with redirect_stdout(captured):
            exec(compile(block.code, where, "exec"), self.space)
        self.output = captured.getvalue()

    def _yaml(self, block: Block, where: str) -> None:
        given = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", block.code))
        config = given.get("attributes", given)
        DatasetSpec.from_config({"name": "x", "shards": "s", "root": "r", **config}, where=where)

    def _sh(self, block: Block, where: str) -> None:
        self.output = ""
        for words, code in commands_of(block.code):
            if words[0] == "export":
                for word in words[1:]:
                    name, _, value = word.partition("=")
                    self._export(name, _in_shell(f'printf %s "{value}"', where))
            elif words[0] == "mm-assets" and (block.is_parsed or words[1] in SERVERS):
                _options(words)
                self.not_run.append(("mm-assets", PARSED if block.is_parsed else ENDLESS))
            elif words[0] == "cd":
                self.monkeypatch.chdir(words[1])
            elif words[0] == "mm-assets":
                self._mm_assets(words, code, where)
            elif words[0] in SHELL:
                if words[0] == "rm":
                    self.before_cleanup()
                line = " ".join(word if set("*?$") & set(word) else shlex.quote(word) for word in words)
                self.output += _in_shell(line, where)
            elif words[0] == "python":
                self.output += _in_shell(shlex.join([sys.executable, *words[1:]]), where)
            else:
                self._other(words, where)

    def _export(self, name: str, value: str) -> None:
        self.monkeypatch.setenv(name, value)

    def _other(self, words: list[str], where: str) -> None:
        """Checks a command that is not run."""
        reason, check = NOT_RUN[words[0]]
        check(words)
        self.not_run.append((words[0], reason))

    def _mm_assets(self, words: list[str], code: int, where: str) -> None:
        result = CliRunner().invoke(main, words[1:], prog_name="mm-assets", catch_exceptions=False)
        self.output += result.output
        assert result.exit_code == code, (where, words, result.output)

    def _text(self, block: Block, where: str) -> None:
        found = " ".join(self.output.split())
        for line in block.code.splitlines():
            assert " ".join(line.split()) in found, (where, line, self.output)

    def _toml(self, block: Block, where: str) -> None:
        tomllib.loads(block.code)

    def _json(self, block: Block, where: str) -> None:
        self._text(block, where)
