"""Links to the viewer, where the environment says that there is one."""

import os
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

__all__ = ["VIEWER_VARIABLE", "viewer_link"]

VIEWER_VARIABLE = "MM_ASSETS_VIEWER_URL"


def viewer_link(dataset: str, partition: str, sample_id: str | None = None) -> str | None:
    """The viewer's page of a partition, or of a sample of it; None where `MM_ASSETS_VIEWER_URL` is not set.

    The variable has the address of a viewer, ``http://host:port``; a ``{dataset}`` in it is the dataset's name. What is
    neither ``http`` nor ``https`` gives no link.
    """
    parts = urlsplit(os.environ.get(VIEWER_VARIABLE, "").replace("{dataset}", quote(dataset, safe="")))
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return None
    page = {"part": partition}
    if sample_id is not None:
        page = {"page": "open", "partition": partition, "sample_id": sample_id}
    query = "&".join(filter(None, (parts.query, urlencode(page, quote_via=quote))))
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rstrip('/')}/", query, ""))
