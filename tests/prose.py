"""Find phrases that an engineer would not write or search for, and print what to write instead.

    python tests/prose.py [FILE_OR_FOLDER ...]

It reads the prose of Markdown files (without code blocks and inline code) and of Python files: docstrings, comments and
every other string, such as an error message. Each finding is one line, `file:line: found -> use`; the exit code is 1 if
there is one. CONTRIBUTING.md has the word list for people, and a test compares it with this one. A pattern belongs here
only if almost every match is a mistake.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs",
    "examples",
    "benchmarks",
    "mm_assets",
    "tests",
)
"""What is checked without arguments."""

EXCLUDED = ("tests/prose.py", "tests/test_prose.py", "benchmarks/loading/results.md")
"""What is skipped in folders: two modules that quote the phrases, and a generated page."""

_AMOUNT = r"(?:bytes|[KMGT]i?B|[mnuµ]s|(?:milli|micro)?seconds|requests?|ranges?|frames|images|samples|columns|rows)"
_THING = r"(?:sample|second|member|image|frame|pixel|row|file|batch|shard|partition|item|thread|tick|step|document)"
_PLACE = r"(?:at|in(?! for)|on|behind|beside|before|below|above|there|here|together|still)"
_COMPARED = r"(?:longer|more|less|fewer|different|better|worse|larger|smaller|need)"

WORDS = {
    rf"(?:stand|stands|stood|standing) {_PLACE}": "is at, is in",
    rf"(?<!there\s)(?:is|are|was|were) no (?!{_COMPARED}\b)\w+": "is not a",
    r"(?:can|cannot|could|could not|may|must|to) be had": "is available, could not be read",
    r"told|tells (?:of|apart|what|how|whether|where|which|its|no)": "determined by, detected from, described in",
    r"(?:say|says|said) of": "determined by, detected from",
    r"(?:give|gives|gave|given|giving) back": "releases, returns",
    r"hand(?:s|ed|ing)? out": "yields, returns",
    r"let(?:s|ting)? go of": "releases",
    r"brought into memory": "paged in, loaded",
    r"dear": "expensive",
    r"cut off|(?:is|are|was|were|be|been|being) cut": "truncated, sliced",
    r"joined (?:files?|readers?|reads?|positions?)": "multi-file",
    r"behind the (?:end|last|live end|tail|record|payload|archive|times?)": "after",
    r"(?:go|goes|went|going) on (?:from|where|with)": "continues, resumes",
    r"anew": "again, from scratch",
    r"whoever|nobody|everybody|somebody": "the caller, no process, every reader",
    r"of one's own": "your own",
    r"in the (?:mean|median)": "on average, the median is",
    r"is the matter(?: of)?": "is handled by, is the cause",
    r"(?:come|comes|came) (?:about|to nothing)": "arises, fails",
    r"whence|amid|thereof|whereupon": "from which, during, of it, then",
    rf"{_AMOUNT} an? {_THING}": "per",
}
"""Pattern of what is found (a blank matches any white space, line ends included) to what is used instead."""

_PATTERNS = [(re.compile(rf"\b(?:{found})\b".replace(" ", r"\s+"), re.IGNORECASE), use) for found, use in WORDS.items()]


def _blanked(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "`", match[0])  # same length and lines; not blanks, across which a pattern would match


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a Markdown file with the number of its first line."""
    text = re.sub(r"^ *```.*?^ *```", _blanked, text, flags=re.MULTILINE | re.DOTALL)
    yield 1, re.sub(r"`[^`\n]+`|\]\([^)\s]*\)", _blanked, text)


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield each string that has white space in it and each block of comments, with the number of its first line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if comments and token.start[0] != comments[-1][0] + 1:
                yield comments[0][0], "\n".join(comment for _, comment in comments)
                comments = []
            comments.append((token.start[0], token.string.lstrip("# ")))
    if comments:
        yield comments[0][0], "\n".join(comment for _, comment in comments)


def findings(path: Path) -> list[tuple[int, str, str]]:
    """Return the line, the phrase and its replacement of everything found in one file, in order."""
    prose = markdown_prose if path.suffix == ".md" else python_prose
    found = set()
    for first, text in prose(path.read_text(encoding="utf-8")):
        for pattern, use in _PATTERNS:
            for match in pattern.finditer(text):
                line = first + text.count("\n", 0, match.start())
                found.add((line, " ".join(match[0].split()), use))
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Print the findings in files and folders, and return the exit code."""
    failed = False
    for checked in arguments or CHECKED:
        top = REPOSITORY / checked
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = path.relative_to(REPOSITORY).as_posix()
            if path.suffix in (".md", ".py") and (path == top or name not in EXCLUDED):
                for line, phrase, use in findings(path):
                    failed = True
                    print(f"{name}:{line}: {phrase} -> {use}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
