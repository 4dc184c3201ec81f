"""Names and times that Dagster allows for tags, concurrency pools and schedules, checked where they are declared."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["CRON", "POOL", "check_cron", "check_pool", "check_tags"]

POOL = r"[A-Za-z0-9_/-]+"
_TAG = r"[A-Za-z0-9_.-]{1,63}(/[A-Za-z0-9_.-]{1,63})?"
_TAG_VALUE = r"[A-Za-z0-9_.-]{0,63}"


_CRON_VALUES = {
    "minute": "[0-5]?[0-9]",
    "hour": "[01]?[0-9]|2[0-3]",
    "day of the month": "0?[1-9]|[12][0-9]|3[01]|[lL]",
    "month": "0?[1-9]|1[0-2]|[A-Za-z]{3}",
    "day of the week": "[0-7]|[A-Za-z]{3}",
}


def _cron_field(value: str) -> str:
    item = rf"(\*|({value})(-({value}))?)(/[0-9]{{1,2}})?"
    return rf"{item}(,{item})*"


_EVERY = "@(hourly|daily|midnight|weekly|monthly|yearly)"
_FIELDS = r"\s+".join(map(_cron_field, _CRON_VALUES.values()))
CRON = rf"^\s*({_EVERY}|{_FIELDS})\s*$"


def check_cron(cron: str) -> str:
    """The times of a schedule; `ValueError` for what is not cron, such as a minute of 99."""
    if not re.fullmatch(CRON, cron):
        expected = f"five fields of cron ({', '.join(_CRON_VALUES)}) such as '0 3 * * *', in UTC"
        raise ValueError(f"is {cron!r}, expected {expected}")
    return cron


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
