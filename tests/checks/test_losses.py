"""The checks of what is lost: dropped rows, limits on losses, and undecodable media."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mm_assets.checks.context import LossLimit

from .changes import Change, Rows, find, repeated, setting, without

# --- dropped rows, renumbering, modes ---------------------------------------------------------------------------------


def drop_b(rows: Rows, *, renumber: bool) -> Rows:
    """The filtered rows without b's first image."""
    kept = [row for row in rows if not (row["sample_id"] == "b" and row["position"] == 0)]
    if renumber:
        find(kept, sample_id="b", position=1)["position"] = 0
    return kept


def dropped_row(**changes: Any) -> dict[str, Any]:
    row = {"sample_id": "b", "position": 0, "modality": "image", "filter": "blur", "reason": "below_min", "value": 1.0}
    return {**row, **changes}


@pytest.mark.parametrize("renumber", [False, True])
def test_dropped_rows_account_for_what_is_missing(partition, renumber: bool) -> None:
    """Rows that are listed as dropped may be missing, and positions may stay or be renumbered."""
    partition.spoil("filtered_rows", lambda rows: drop_b(rows, renumber=renumber))
    partition.spoil("dropped", lambda rows: [*rows, dropped_row()])
    assert partition.failed("filtered_rows") == set()


def test_positions_may_not_be_renumbered_here_and_there(make_partition, tmp_path: Path) -> None:
    """Positions that stay in one sample and are renumbered in another are a violation."""
    members = [(f"{key}.{n}.txt", b"text") for key in "bc" for n in range(3)]
    made = make_partition(tmp_path, members)
    made.spoil("dropped", lambda rows: [dropped_row(sample_id=key, modality="text") for key in "bc"])

    def change(rows: Rows) -> Rows:
        kept = [row for row in rows if row["position"] != 0]
        for row in kept:
            row["position"] -= row["sample_id"] == "b" and row["position"] > 0
        return kept

    made.spoil("filtered_rows", change)
    assert made.failed("filtered_rows") == {"same_rows"}


@pytest.mark.parametrize(
    "wrong",
    [{"sample_id": "nobody"}, {"position": 17}, {"modality": "audio"}, {"filter": ""}, {"reason": ""}],
    ids=str,
)
def test_dropped_row_must_be_a_materialized_one_with_a_reason(partition, wrong: dict[str, Any]) -> None:
    """A dropped row that never was, or that no filter or reason explains, is a violation."""
    partition.spoil("filtered_rows", lambda rows: drop_b(rows, renumber=False))
    partition.spoil("dropped", lambda rows: [*rows, dropped_row(**wrong)])
    assert "dropped" in partition.failed("filtered_rows")


def test_a_row_is_dropped_once(partition) -> None:
    """A row that is listed twice among the dropped does not make up for another that vanished."""
    partition.spoil(
        "filtered_rows", lambda rows: [r for r in rows if not (r["sample_id"] == "b" and r["position"] >= 0)]
    )
    partition.spoil("dropped", lambda rows: [*rows, dropped_row(), dropped_row(filter="other")])
    assert "accounting" in partition.failed("filtered_rows")


# --- limits on losses -------------------------------------------------------------------------------------------------


def limit(allowed: int | str) -> LossLimit:
    return LossLimit(setting="max_lost", allowed=allowed, command="mm-assets losses --dataset d --partition p")


@pytest.mark.parametrize(("asset", "table"), [("rows", "rejects"), ("filtered_rows", "dropped")])
@pytest.mark.parametrize(
    ("lost", "allowed", "passes"),
    [
        (0, 0, True),
        (1, 0, False),
        (3, 3, True),
        (4, 3, False),
        (0, "0%", True),
        (1, "0%", False),
        (29, "29%", True),  # 0.29 * 100 is less than 29 in binary
        (30, "29%", False),
        (1, "0.999999%", False),
        (1, "1%", True),
        (100, "100%", True),
    ],
)
def test_losses_stay_within_their_limit(
    partition, asset: str, table: str, lost: int, allowed: int | str, passes: bool
) -> None:
    """Of 100 rows as many may be lost as a number or a percentage allows, and the violation says the figures."""
    kept, losses = partition.read(asset), partition.read(table)
    kinds = {pa.string(): "x", pa.int32(): 0, pa.float64(): 0.0}
    entry = {field.name: kinds[field.type] for field in losses.schema}
    partition.write(asset, kept.take(pa.array([0] * (100 - lost), pa.int64())))
    partition.write(table, pa.Table.from_pylist([entry] * lost, losses.schema))
    outcome = partition.outcomes(asset, loss_limit=limit(allowed))["losses"]
    assert (outcome.passed, outcome.blocking) == (passes, True)
    if not passes:
        (violation,) = outcome.violations
        said = f"max_lost: {lost} of 100 items lost ({lost} %), at most {allowed} allowed"
        assert violation == {"problem": f"{said}: `mm-assets losses --dataset d --partition p` lists them"}
        assert outcome.said == violation["problem"]


def test_nothing_limits_losses_by_default(partition) -> None:
    """Without a limit, and in tables without rows, any loss passes."""
    partition.spoil("dropped", lambda rows: [dropped_row()] * 50)
    assert "losses" not in partition.failed("filtered_rows")
    partition.spoil("filtered_rows", lambda rows: [])
    partition.spoil("dropped", lambda rows: [])
    assert partition.outcomes("filtered_rows", loss_limit=limit("0%"))["losses"].passed


# --- undecodable media ------------------------------------------------------------------------------------------------

UNDECODABLE = {"filter": "decodable", "reason": "undecodable"}


def undecodable(partition, policy: str) -> None:
    """Makes b's first image undecodable under a policy, as the stage would."""
    ref = find(partition.read("materialized_rows").to_pylist(), sample_id="b", position=0)["source_ref"]
    item = {"sample_id": "b", "position": 0, "modality": "image", "member": "b.0.jpg", "source_ref": ref}
    item |= {"field": "image", "reason": "undecodable", "detail": "truncated", "action": policy}
    partition.spoil("undecodable", lambda rows: [item])
    if policy == "drop_row":
        partition.spoil("filtered_rows", lambda rows: drop_b(rows, renumber=False))
        partition.spoil("dropped", lambda rows: [dropped_row(**UNDECODABLE)])
    elif policy == "drop_sample":
        gone = [row for row in partition.read("filtered_rows").to_pylist() if row["sample_id"] == "b"]
        partition.spoil("filtered_rows", lambda rows: [row for row in rows if row["sample_id"] != "b"])
        keys = [{name: row[name] for name in ("sample_id", "position", "modality")} for row in gone]
        partition.spoil("dropped", lambda rows: [dropped_row(**key, **UNDECODABLE) for key in keys])


@pytest.mark.parametrize("policy", ["drop_row", "drop_sample", "keep"])
def test_undecodable_media_are_what_the_policy_says(partition, policy: str) -> None:
    """What each policy makes of an undecodable item violates nothing, and is a violation under any other policy."""
    undecodable(partition, policy)
    assert partition.failed("filtered_rows", on_undecodable=policy) == set()
    for other in {"drop_row", "drop_sample", "keep", "fail"} - {policy}:
        assert partition.failed("filtered_rows", on_undecodable=other) == {"decodable"}


@pytest.mark.parametrize(
    ("policy", "table", "change"),
    [
        ("drop_row", "undecodable", lambda rows: rows.clear()),
        ("drop_row", "undecodable", setting("position", 1)),
        ("drop_row", "undecodable", setting("sample_id", "nobody")),
        ("drop_row", "undecodable", setting("modality", "text")),
        ("drop_row", "undecodable", setting("source_ref", None)),
        ("drop_row", "undecodable", setting("reason", "")),
        ("drop_row", "undecodable", setting("detail", "")),
        ("drop_row", "undecodable", setting("field", "")),
        ("drop_row", "undecodable", setting("action", "keep")),
        ("drop_row", "undecodable", repeated()),
        ("drop_row", "dropped", setting("filter", "blur")),
        ("drop_sample", "dropped", without(position=1)),
        ("drop_sample", "undecodable", lambda rows: rows.clear()),
        ("keep", "dropped", lambda rows: [dropped_row(**UNDECODABLE)]),
    ],
)
def test_undecodable_media_are_accounted_for(partition, policy: str, table: str, change: Change) -> None:
    """An item without its loss, a loss without its item, or a wrong cell of either is a violation."""
    undecodable(partition, policy)
    partition.spoil(table, change)
    assert "decodable" in partition.failed("filtered_rows", on_undecodable=policy)


@pytest.mark.parametrize("reason", ["refused", "omitted"])
def test_contents_with_another_fault_are_kept(partition, reason: str) -> None:
    """A text with a fault is kept under any policy, once for each field; another action or a repeat is a violation."""
    text = find(partition.read("materialized_rows").to_pylist(), modality="text")
    item = {name: text[name] for name in ("sample_id", "position", "modality", "source_ref")}
    item |= {"field": "words", "reason": reason, "detail": "line 3", "action": "keep"}
    partition.spoil("undecodable", lambda rows: [item, {**item, "field": "subtitles"}])
    assert partition.failed("filtered_rows", on_undecodable="drop_sample") == set()
    for wrong in (
        [item, item],
        [{**item, "action": "drop_sample"}],
        [{**item, "detail": ""}],
        [{**item, "position": 9}],
        [{**item, "reason": "undecodable"}],
    ):
        partition.spoil("undecodable", lambda rows, wrong=wrong: wrong)
        assert "decodable" in partition.failed("filtered_rows", on_undecodable="drop_sample")
