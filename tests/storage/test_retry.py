"""The retry policies: how long they wait, and that the documentation says so."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_assets.orchestration.recorder import DATABASE
from mm_assets.storage.retry import STORAGE, Retry
from mm_assets.storage.urls import storage_fault

RELIABILITY = Path(__file__).parents[2] / "docs" / "spec" / "reliability.md"


@given(pauses=st.lists(st.floats(0.0, 1e6), max_size=9).map(tuple), jitter=st.floats(0.0, 2.0))
def test_jitter_only_prolongs_pauses(pauses: tuple[float, ...], jitter: float) -> None:
    """There are as many waits as pauses, none is shorter, and none is longer than the jitter allows."""
    policy: Retry[object] = Retry(pauses=pauses, jitter=jitter, may_pass=lambda _: True)
    waits = policy.waits()
    assert len(waits) == len(pauses)
    assert all(pause <= wait <= pause * (1 + jitter) * (1 + 1e-9) for pause, wait in zip(pauses, waits, strict=True))
    assert sum(waits) >= policy.total_seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [(ConnectionResetError("reset"), True), (TimeoutError("late"), True), (FileNotFoundError("x"), False)],
)
def test_what_a_storage_may_recover_from(error: Exception, may_pass: bool) -> None:
    """A lost connection or a time-out may pass; a missing file does not."""
    assert STORAGE.may_pass(storage_fault(error)) == may_pass


@pytest.mark.parametrize(("name", "policy"), [("the storage", STORAGE), ("Dagster's database", DATABASE)])
def test_the_documentation_has_the_numbers(name: str, policy: Retry[object]) -> None:
    """The pauses, their sum and the jitter are those of the table in docs/spec/reliability.md."""
    (row,) = [line for line in RELIABILITY.read_text().splitlines() if line.startswith(f"| {name} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    pauses = ", ".join(f"{pause:g}" for pause in policy.pauses)
    assert cells[1:4] == [pauses, f"{policy.jitter:.0%}", f"{policy.total_seconds:g}"]
