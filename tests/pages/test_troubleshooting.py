"""docs/spec/messages.md quotes messages as they are: each heading is in the code, or is raised here.

`test_guides.py` runs the blocks of the page. docs/how-to/troubleshooting.md has the frequent ones of its messages.
"""

import ast
import errno
import importlib.util
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

from mm_assets import errors
from mm_assets.errors import SourceError
from mm_assets.storage.urls import storage_errors

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "spec" / "messages.md").read_text(encoding="utf-8")
FREQUENT = (REPOSITORY / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))

DAGSTER = {
    "The environment variable $DAGSTER_HOME is not set": "dagster._core.instance",
    "$DAGSTER_HOME … must be an absolute path": "dagster._core.instance",
    "… not found in repository": "dagster._cli",
}
"""Messages of Dagster, with the package whose source has them."""

# As Amazon words them: code, message, HTTP status.
S3 = [
    ("403", "Forbidden", 403),
    ("AccessDenied", "Access Denied", 403),
    ("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.", 403),
    (
        "SignatureDoesNotMatch",
        "The request signature we calculated does not match the signature you provided. Check your key.",
        403,
    ),
    ("ExpiredToken", "The provided token has expired.", 400),
    ("RequestTimeTooSkewed", "The difference between the request time and the current time is too large.", 403),
    ("NoSuchBucket", "The specified bucket does not exist", 404),
    (
        "PermanentRedirect",
        "The bucket you are attempting to access must be addressed using the specified endpoint.",
        301,
    ),
    ("SlowDown", "Please reduce your request rate.", 503),
]


def texts(folder: Path) -> str:
    """The texts in the source files of a folder, a line for each, with … for what is filled in."""
    found = []
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    found += [file.read_text(encoding="utf-8") for file in folder.rglob("*.sql")]  # checks word their violations
    return "\n".join(" ".join(text.split()).replace("`", "") for text in found)


@cache
def own_texts() -> str:
    return texts(REPOSITORY / "mm_assets")


def dagster_texts(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return texts(Path(spec.origin).parent)


def system_texts() -> str:
    """What the system says where a disk is full, a folder is closed, or a port is taken."""
    return "\n".join(os.strerror(code) for code in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EADDRINUSE))


def s3_texts() -> str:
    """What this project says where S3 refuses, for each of its answers."""
    client_error = pytest.importorskip("botocore.exceptions").ClientError
    translated = pytest.importorskip("s3fs.errors").translate_boto_error
    said = []
    for code, message, status in S3:
        answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
        with pytest.raises(SourceError) as refused, storage_errors("s3://bucket/key", "cannot be read"):
            raise translated(client_error(answer, "GetObject"))
        said.append(str(refused.value))
    return "\n".join(said)


def says(text: str, message: str) -> bool:
    """Whether a line of a text has the parts of a message in order, whatever is between them."""
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip(" :()")]
    assert parts, message
    return re.search(".*".join(parts), text, flags=re.IGNORECASE) is not None


@pytest.mark.parametrize("heading", SECTIONS)
def test_each_message_is_what_is_said(heading: str) -> None:
    """The parts of a heading are in a text of the code, in printed output of its section, or in an error made here."""
    message = heading.replace("`", "")
    if named := re.search(r" \((\w+Error)\)$", message):
        assert hasattr(errors, named[1])
        message = message[: named.start()]
    blocks = re.findall(r"^```text\n(.*?)^```", SECTIONS[heading], flags=re.MULTILINE | re.DOTALL)
    printed = " ".join(" ".join(blocks).split())
    sources: list[Callable[[], str]] = [lambda: printed, own_texts, system_texts, s3_texts]
    if heading in DAGSTER:
        sources = [lambda: dagster_texts(DAGSTER[heading])]
    if message != "database is locked":
        assert any(says(source(), message) for source in sources), heading


def test_frequent_messages_are_among_all() -> None:
    """Each heading of the page of frequent messages is one of the page of all messages."""
    headings = re.findall(r"^### ([^\n]+)$", FREQUENT, flags=re.MULTILINE)
    assert len(headings) > 20
    assert [heading for heading in headings if heading not in SECTIONS] == []


def test_a_locked_database(tmp_path: Path) -> None:
    """SQLite says so while another connection writes."""
    with (
        closing(sqlite3.connect(tmp_path / "x.db")) as one,
        closing(sqlite3.connect(tmp_path / "x.db", timeout=0)) as two,
    ):
        one.execute("create table x (y)")
        one.execute("begin immediate")
        with pytest.raises(sqlite3.OperationalError, match="database is locked"):
            two.execute("begin immediate")
    assert "database is locked" in SECTIONS


def test_messages_in_a_section_are_said() -> None:
    """What a section quotes as a further message is said by S3, the system, or the code."""
    quoted = re.findall(r"`([A-Z][^`]+ [^`]+\.)`|Also `([^`]+)`", PAGE.replace("\n", " "))
    messages = [first or second for first, second in quoted]
    assert len(messages) >= 3
    said = "\n".join((s3_texts(), system_texts(), own_texts()))
    assert [message for message in messages if not says(said, message)] == []
