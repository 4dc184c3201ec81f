"""Names that Dagster allows for tags and concurrency pools, checked where a declaration is read."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["POOL", "check_pool", "check_tags"]

POOL = r"[A-Za-z0-9_/-]+"
_TAG = r"[A-Za-z0-9_.-]{1,63}(/[A-Za-z0-9_.-]{1,63})?"
_TAG_VALUE = r"[A-Za-z0-9_.-]{0,63}"


def check_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    """The tags of assets; `ValueError` for what Dagster refuses."""
    for name, value in tags.items():
        if not re.fullmatch(_TAG, name) or name.startswith("dagster/"):
            raise ValueError(f"has {name!r}, expected letters, digits, `_`, `-` and `.`, and no prefix `dagster/`")
        if not re.fullmatch(_TAG_VALUE, value):
            raise ValueError(f"has {value!r} for {name!r}, expected letters, digits, `_`, `-` and `.`, at most 63")
    return tags


def check_pool(pool: str) -> str:
    """The name of a concurrency pool; `ValueError` for what Dagster refuses."""
    if not re.fullmatch(POOL, pool):
        raise ValueError(f"is {pool!r}, expected letters, digits, `_`, `-` and `/`")
    return pool
