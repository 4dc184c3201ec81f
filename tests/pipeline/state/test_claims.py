"""Claims: of several loads each takes what no other has taken before, and what a lost load had claimed is free soon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_assets.errors import ConfigError, SourceError
from mm_assets.pipeline.state import claims as module
from mm_assets.pipeline.state.claims import CLAIM_SECONDS, Claim, Claims, Slice
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.storage.store import Store

from ..chain import declare

WRONG_SLICE = b'{"load": "x", "process": "y", "keys": null, "slice": 3}'


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetStore:
    """An empty folder."""
    return DatasetStore(declare(tmp_path / "root", tmp_path / "in"))


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def on_another_host(dataset: DatasetStore, load: str, renewal: int = 1, keys: frozenset[str] | None = None) -> None:
    """Writes a claim of a load whose process this host cannot know."""
    claim = Claim(load=load, process="elsewhere/pid:[1] boot 17 99", keys=keys)
    dataset.store.write_bytes(f"claims/{load}.json", claim.to_bytes(renewal))


def test_the_first_claim_goes_before_the_second(dataset: DatasetStore) -> None:
    """A load learns what was claimed before it, in part or all, and one that ends leaves nothing."""
    with Claims(dataset, "b") as first, Claims(dataset, "a") as second:
        assert first.take(["x", "y"]) == []
        (claim,) = second.take(None)
        assert claim.load == "b"
        assert [key in claim for key in ("x", "y", "z")] == [True, True, False]
        assert first.others()[0].load == "a"
        first.keep(())
        assert "x" not in second.others()[0]
    assert dataset.store.sizes("claims") == {}


def test_of_two_at_the_same_time_the_smaller_id_goes_first(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads that see each other only after they have written claims agree on who goes first."""
    with Claims(dataset, "a") as a, Claims(dataset, "b") as b:
        seen: dict[str, list[Claim]] = {}
        renew = Claims.renew

        def both(self: Claims) -> None:
            renew(self)
            if self is a:
                on_another_host(dataset, "b")
            else:
                on_another_host(dataset, "a")

        monkeypatch.setattr(Claims, "renew", both)
        seen["a"] = a.take(None)
        a.release()
        dataset.store.delete("claims/b.json")
        seen["b"] = b.take(None)
    assert ([claim.load for claim in seen["a"]], [claim.load for claim in seen["b"]]) == ([], ["a"])


def test_of_two_that_take_over_the_same_the_smaller_id_goes_first(
    dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads that have waited for a third one have claims already, and take what it left at the same time."""
    with Claims(dataset, "b") as b:
        b.take(["x"])
        on_another_host(dataset, "a", 1, frozenset({"y"}))
        renew = Claims.renew

        def both(self: Claims) -> None:
            renew(self)
            on_another_host(dataset, "a", 2, frozenset({"z"}))

        monkeypatch.setattr(Claims, "renew", both)
        assert any("z" in claim for claim in b.take(["z"]))


def test_a_claim_is_narrowed_without_its_storage(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that fails when partitions have ended fails no load, and hides no error of theirs."""
    with Claims(dataset, "mine") as claims:
        claims.take(["x", "y"])
        with monkeypatch.context() as patched:
            patched.setattr(Store, "write_bytes", failing)
            claims.keep(["y"])
        claims.renew()
        assert [key in Claims(dataset, "other").others()[0] for key in "xy"] == [False, True]


def failing(*_: object, **__: object) -> None:
    raise SourceError("claims", "cannot be written")


def test_a_claim_of_another_host_expires_when_it_stays_the_same(dataset: DatasetStore) -> None:
    """It counts while it changes, whatever any clock says, and for `CLAIM_SECONDS` of the observer's after that."""
    clock = Clock()
    claims = Claims(dataset, "mine", clock=clock)
    for renewal in range(1, 5):
        on_another_host(dataset, "other", renewal)
        assert [claim.load for claim in claims.others()] == ["other"]
        clock.now += CLAIM_SECONDS - 1
        assert [claim.load for claim in claims.others()] == ["other"]
    clock.now += 2
    assert claims.others() == []
    on_another_host(dataset, "other", 5)
    assert [claim.load for claim in claims.others()] == ["other"]


def test_a_claim_of_a_killed_process_of_this_host_does_not_count(dataset: DatasetStore) -> None:
    """It is free at once: the host knows that its process has exited."""
    code = (
        "import os, signal, sys\n"
        "from mm_assets.pipeline.state.claims import Claims\n"
        "from mm_assets.pipeline.state.folder import DatasetStore\n"
        "from mm_assets.pipeline.spec import DatasetSpec\n"
        "spec = DatasetSpec.from_config({'name': 'data', 'shards': 'in', 'root': sys.argv[1]}, where='x')\n"
        "Claims(DatasetStore(spec), 'killed').take(None)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = dataset.spec.root
    assert subprocess.run([sys.executable, "-c", code, root], check=False).returncode == -9
    assert list(dataset.store.sizes("claims")) == ["claims/killed.json"]
    assert Claims(dataset, "mine").others() == []


@pytest.mark.parametrize("content", [b"", b"[]", b'{"load": "x"}', b"\xff", b"[" * 100_000, WRONG_SLICE])
def test_a_damaged_claim_claims_nothing(dataset: DatasetStore, content: bytes) -> None:
    """Losing or garbling a claim costs time, never data."""
    dataset.store.write_bytes("claims/other.json", content)
    assert Claims(dataset, "mine").others() == []


def test_a_claim_is_renewed_while_its_load_works(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread rewrites it, so that others see that it changes."""
    monkeypatch.setattr(module, "CLAIM_SECONDS", 0.03)
    with Claims(dataset, "mine") as claims:
        claims.take(["x"])
        first = dataset.store.read_bytes("claims/mine.json")
        assert wait(lambda: dataset.store.read_bytes("claims/mine.json") != first)


def wait(holds: Callable[[], bool]) -> bool:
    """Waits up to ten seconds until something holds."""
    import time

    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()


def test_slices_share_all_keys() -> None:
    """Each key is in one of the slices, and a claim of a slice covers those of it."""
    keys = [f"shard-{n:05d}" for n in range(500)]
    slices = [Slice.parse(f"{n}/7") for n in range(1, 8)]
    assert all(sum(key in part for part in slices) == 1 for key in keys)
    claim = Claim(load="x", process="host", part=slices[2])
    assert [key for key in keys if key in claim] == [key for key in keys if key in slices[2]]
    assert Claim.from_bytes(claim.to_bytes(1)) == claim
    for wrong in ("0/3", "4/3", "a/b", "1"):
        with pytest.raises(ConfigError, match="--slice"):
            Slice.parse(wrong)
