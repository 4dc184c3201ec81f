"""Changes to the rows of a table that spoil it for a check."""

import json
from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
Change = Callable[[Rows], Any]


def find(rows: Rows, **wanted: Any) -> dict[str, Any]:
    """The first row with these values."""
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def setting(column: str, value: Any, **wanted: Any) -> Change:
    """Sets one cell of the first row with the wanted values."""

    def change(rows: Rows) -> None:
        find(rows, **wanted)[column] = value

    return change


def without(**wanted: Any) -> Change:
    """Takes out the first row with the wanted values."""

    def change(rows: Rows) -> None:
        rows.remove(find(rows, **wanted))

    return change


def repeated(**wanted: Any) -> Change:
    """Adds the first row with the wanted values once more, behind it."""

    def change(rows: Rows) -> None:
        row = find(rows, **wanted)
        rows.insert(rows.index(row), dict(row))

    return change


def named_twice(place: int, **wanted: Any) -> Change:
    """Adds a row of the same member at the next position: `place` rows behind the first row with the wanted values."""

    def change(rows: Rows) -> None:
        row = find(rows, **wanted)
        rows.insert(rows.index(row) + place, {**row, "position": row["position"] + 1})

    return change


def moved_to_end(**wanted: Any) -> Change:
    """Moves the first row with the wanted values behind all others."""

    def change(rows: Rows) -> None:
        row = find(rows, **wanted)
        rows.remove(row)
        rows.append(row)

    return change


def altered(**wanted: Any) -> Change:
    """Alters the last byte of the content of the first row with the wanted values."""

    def change(rows: Rows) -> None:
        row = find(rows, **wanted)
        row["binary_content"] = row["binary_content"][:-1] + bytes([row["binary_content"][-1] ^ 1])

    return change


def relocated(**parts: Any) -> Change:
    """Changes parts of the locator of the row of sample a's image."""

    def change(rows: Rows) -> None:
        row = find(rows, sample_id="a", modality="image")
        row["source_ref"] = json.dumps({**json.loads(row["source_ref"]), **parts})

    return change


def without_locator(rows: Rows) -> None:
    """Takes the locator from a media row."""
    find(rows, sample_id="a", modality="image")["source_ref"] = None


def more_rejects(rows: Rows) -> None:
    """Names a member that the shard does not have."""
    rows.append({**rows[0], "member": "no such member.png"})


def resourced(column: str, *, modality: str = "image", **parts: Any) -> Change:
    """Changes fields of `source` or `source_member` on a row of sample a."""

    def change(rows: Rows) -> None:
        row = find(rows, sample_id="a", modality=modality)
        row[column] = {**row[column], **parts}

    return change
