"""Leases: of several processes one works on a partition, and one that is lost blocks it for less than a minute."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from mm_assets.errors import SourceError
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.leases import LEASE_SECONDS, Holder, Lease, LeasedError, Leases
from mm_assets.storage.store import Store

from ..chain import declare

ELSEWHERE = "elsewhere/pid:[1] boot 1 2"
WAIT = 200.0  # for what takes seconds on an idle machine


class Clock:
    """Seconds since 1970 that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetStore:
    return DatasetStore(declare(tmp_path / "out", tmp_path / "*.tar"))


def on_another_host(dataset: DatasetStore, until: float) -> None:
    lease = Lease(run="other", owner=ELSEWHERE, until=until)
    dataset.store.write_bytes(Leases.file_name("a"), lease.to_bytes())


def test_one_process_has_a_lease(dataset: DatasetStore) -> None:
    """A lease is refused while another run of a living process has it, and available after it; names are apart."""
    with Leases(dataset, "first") as first, Leases(dataset, "second") as second:
        with first.held("a"), second.held("b"):
            with (
                pytest.raises(LeasedError, match="another run is working on partition 'a'") as refused,
                second.held("a"),
            ):
                pass
            assert refused.value.seconds is None
        with second.held("a"):
            assert second.live("a") is not None
        assert not dataset.store.sizes("leases")


def test_a_lease_of_another_host_ends(dataset: DatasetStore) -> None:
    """Of another host it is not known whether it lives: its lease says how long to wait, and is taken over then."""
    clock = Clock()
    on_another_host(dataset, clock.now + 30)
    with Leases(dataset, "mine", clock=clock) as leases:
        with pytest.raises(LeasedError, match="on host elsewhere") as refused, leases.held("a"):
            pass
        assert 30 < refused.value.seconds <= 40  # another process may have a clock that is behind
        assert leases.live("a") == Lease(run="other", owner=ELSEWHERE, until=clock.now + 30)
        clock.now += 31
        assert leases.live("a") is None
        with leases.held("a"):
            found = leases.live("a")
            assert found is not None
            assert (found.run, found.until) == ("mine", clock.now + LEASE_SECONDS)


def test_a_lease_is_renewed_while_its_owner_works(dataset: DatasetStore) -> None:
    """It is written again before it ends; where its owner was suspended and another host has it, it is left alone."""
    clock = Clock()
    with Leases(dataset, "mine", clock=clock) as leases, leases.held("a"):
        for _ in range(5):
            clock.now += LEASE_SECONDS / 3
            leases.renew()
            found = leases.live("a")
            assert found is not None
            assert found.until == clock.now + LEASE_SECONDS
        clock.now += LEASE_SECONDS + 1
        on_another_host(dataset, clock.now + 30)
        leases.renew()
        found = leases.live("a")
        assert found is not None
        assert found.run == "other"
    assert dataset.store.exists(Leases.file_name("a"))


def test_a_storage_that_was_away_ends_no_lease_for_good(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage longer than a lease, a run is alive for other hosts again, with the partitions it works on."""
    clock = Clock()
    other = Holder("other", ELSEWHERE)
    with (
        Leases(dataset, "load", clock=clock) as driver,
        Leases(dataset, "other", holder=other, clock=clock) as others,
        driver.of_run(),
        driver.held("a"),
        driver.held("b"),
    ):
        monkeypatch.setattr(Lease, "is_gone", None)  # as another host sees it
        with monkeypatch.context() as patch:
            patch.setattr(Store, "write_bytes", refuse_to_write)
            for _ in range(6):
                clock.now += LEASE_SECONDS / 3
                driver.renew()
        assert others.live(Leases.run_name("load")) is None
        with others.held("b"):
            driver.renew()
            assert others.live(Leases.run_name("load")) is not None
            with pytest.raises(LeasedError, match="partition 'a'"), others.held("a"):
                pass
    assert not dataset.store.exists(Leases.file_name("a"))


def refuse_to_write(store: Store, name: str, content: bytes) -> None:
    raise SourceError(name, "the storage is away")


def test_a_worker_releases_a_lease_that_its_driver_renews(dataset: DatasetStore) -> None:
    """A worker writes its lease once, however long it works; it ends with the work, unless another run has it then."""
    clock = Clock()
    with Leases(dataset, "load", clock=clock) as driver, driver.of_run():
        for taken_over in (False, True):
            with Leases(dataset, "load", holder=driver.holder, clock=clock) as worker, worker.held("a"):
                written = dataset.store.read_bytes(Leases.file_name("a"))
                for _ in range(6):
                    clock.now += LEASE_SECONDS / 3
                    driver.renew()
                assert dataset.store.read_bytes(Leases.file_name("a")) == written
                found = driver.live("a")
                assert found is not None
                assert found.until == clock.now + LEASE_SECONDS
                if taken_over:
                    on_another_host(dataset, clock.now + 30)
            assert dataset.store.exists(Leases.file_name("a")) == taken_over


def test_one_file_is_renewed(dataset: DatasetStore) -> None:
    """However many leases a run holds, it renews its own; another host sees all of them as valid, and none later."""
    clock = Clock()
    with Leases(dataset, "mine", clock=clock) as leases, ExitStack() as held:
        for number in range(20):
            held.enter_context(leases.held(f"p{number}"))
        before = dataset.store.listing("leases")
        clock.now += LEASE_SECONDS / 3
        leases.renew()
        assert dataset.store.listing("leases") == before
        assert list(dataset.store.sizes("leases/runs")) == [Leases.file_name(Leases.run_name("mine"))]
        clock.now += LEASE_SECONDS - 1
        with Leases(dataset, "other", clock=clock) as others:
            found = others.live("p7")
            assert found is not None
            assert found.until == clock.now + 1
            with pytest.raises(LeasedError), others.held("p7"):
                pass
            clock.now += 2
            assert others.live("p7") is None
    assert not dataset.store.sizes("leases/runs")


def test_a_lease_that_could_not_be_deleted_is_its_runs(dataset: DatasetStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose storage failed when a lease was released gets it again at once."""
    with Leases(dataset, "mine") as leases:
        with monkeypatch.context() as patch:
            patch.setattr(Store, "delete", refuse)
            with leases.held("a"):
                pass
        assert dataset.store.exists(Leases.file_name("a"))
        with leases.held("a"):
            pass
        assert not dataset.store.exists(Leases.file_name("a"))


def refuse(store: Store, name: str) -> None:
    raise SourceError(name, "the storage is away")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": "x", "owner": "y", "until": "soon"}'])
def test_a_damaged_lease_is_none(dataset: DatasetStore, content: bytes) -> None:
    """What a killed process or a full disk left does not block the partition."""
    dataset.store.write_bytes(Leases.file_name("a"), content)
    with Leases(dataset, "mine") as leases, leases.held("a"):
        assert leases.live("a") is not None


def test_a_killed_owner_is_noticed_at_once(dataset: DatasetStore) -> None:
    """The lease of a process of this host that was killed is taken over without waiting."""
    code = (
        "import sys\nfrom mm_assets.pipeline.state.leases import Leases\n"
        "from mm_assets.pipeline.state.folder import DatasetStore\n"
        "from mm_assets.pipeline.spec import DatasetSpec\n"
        "spec = DatasetSpec.from_config({'name': sys.argv[2], 'shards': sys.argv[1], 'root': sys.argv[1]}, where='x')\n"
        "with Leases(DatasetStore(spec), 'killed').held('a'):\n    print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, dataset.spec.root, dataset.spec.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "held"
        with Leases(dataset, "mine") as leases:
            with pytest.raises(LeasedError), leases.held("a"):
                pass
            child.kill()
            child.wait(WAIT)
            with leases.held("a"):
                pass


def test_of_several_processes_one_takes_a_lease_over(dataset: DatasetStore) -> None:
    """Six processes that find an expired lease at the same time: one works on the partition."""
    on_another_host(dataset, 0.0)
    code = (
        "import sys\nfrom mm_assets.pipeline.state.leases import LeasedError, Leases\n"
        "from mm_assets.pipeline.state.folder import DatasetStore\nfrom mm_assets.pipeline.spec import DatasetSpec\n"
        "spec = DatasetSpec.from_config({'name': sys.argv[2], 'shards': sys.argv[1], 'root': sys.argv[1]}, where='x')\n"
        "leases = Leases(DatasetStore(spec), sys.argv[3])\nprint('ready', flush=True); input()\n"
        "try:\n    with leases.held('a'):\n        print('won', flush=True); input()\n"
        "except LeasedError:\n    print('refused', flush=True)\n"
    )
    command = [sys.executable, "-c", code, dataset.spec.root, dataset.spec.name]
    children = [
        subprocess.Popen([*command, f"run{n}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(6)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == "ready"
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        said = Counter(child.stdout.readline().strip() for child in children if child.stdout is not None)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert said == {"won": 1, "refused": 5}
