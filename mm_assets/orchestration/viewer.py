"""Links to the viewer: that of the environment, else the one that `mm-assets ui` runs beside Dagster's pages."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

from mm_assets.pipeline.dagster_home import VIEWER_FILE

__all__ = ["VIEWER_PORT", "VIEWER_VARIABLE", "claim_viewer", "expect_viewer", "viewer_link"]

VIEWER_PORT = 3001  # of `mm-assets ui`, by default
VIEWER_VARIABLE = "MM_ASSETS_VIEWER_URL"


def viewer_link(dataset: str, partition: str | None = None, sample_id: str | None = None) -> str | None:
    """The viewer's page of a dataset, of a partition of it, or of a sample; None where there is no viewer.

    `MM_ASSETS_VIEWER_URL` has the address of a viewer, ``http://host:port``; a ``{dataset}`` in it is the dataset's
    name. Where it is not set, the address is what `mm-assets ui` stored in the folder of the Dagster instance. What is
    neither ``http`` nor ``https`` gives no link.
    """
    parts = urlsplit(_address().replace("{dataset}", quote(dataset, safe="")))
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return None
    page = {}
    if partition is not None and sample_id is not None:
        page = {"page": "open", "partition": partition, "sample_id": sample_id}
    elif partition is not None:
        page = {"part": partition}
    query = "&".join(filter(None, (parts.query, urlencode(page, quote_via=quote))))
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/", query, ""))


def _address() -> str:
    given, home = os.environ.get(VIEWER_VARIABLE), os.environ.get("DAGSTER_HOME")
    if given is None and home:
        with suppress(OSError, ValueError):  # there is none, or it is another user's
            return Path(home, VIEWER_FILE).read_text(encoding="ascii").strip()
    return given or ""


def expect_viewer(home: Path) -> None:
    """Stores where `mm-assets ui` will have the viewer, unless it was started: links are stored before that.

    Args:
        home: the instance's folder.

    Raises:
        OSError: the file cannot be written.
    """
    if not (home / VIEWER_FILE).exists():
        claim_viewer(home, f"http://127.0.0.1:{VIEWER_PORT}")


def claim_viewer(home: Path, address: str) -> str:
    """Stores where the viewer of an instance is, so that links lead there; returns its token.

    The token is made once and stays the same, because links that are stored with events hold it. The file is for its
    owner alone.

    Args:
        home: the instance's folder.
        address: of the viewer, ``http://host:port``.

    Raises:
        OSError: the file cannot be written.
    """
    file = home / VIEWER_FILE
    token = ""
    with suppress(FileNotFoundError):
        token = parse_qs(urlsplit(file.read_text(encoding="utf-8", errors="replace").strip()).query).get("t", [""])[0]
    token = token or secrets.token_urlsafe(24)
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as stream:
        stream.write(f"{address}/{{dataset}}/?t={token}\n")
    new.replace(file)
    return token
