"""Which samples each batch of each rank holds: exactly once, whatever the ranks, sizes and places of resumption."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_assets.errors import ConfigError
from mm_assets.loading import plan as loader_plan
from mm_assets.loading.order import Blocks, EpochOrder
from mm_assets.loading.plan import LAST, EpochPlan, Step, find_rank

orders = st.builds(
    EpochOrder,
    num_samples=st.integers(0, 400),
    shuffle=st.one_of(st.booleans(), st.builds(Blocks, st.integers(1, 50), st.integers(1, 4))),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
divisions = st.fixed_dictionaries({
    "batch_size": st.integers(1, 40),
    "world_size": st.integers(1, 7),
    "last": st.sampled_from(LAST),
})  # fmt: skip


def ranks_of(order: EpochOrder, division: dict[str, Any]) -> list[EpochPlan]:
    return [EpochPlan(order=order, rank=rank, **division) for rank in range(division["world_size"])]


def in_step(plans: list[EpochPlan], start: int, limit: int | None = None) -> list[list[Step]]:
    """The steps of all ranks, rank by rank in each; a rank that has no batch in a step is left out."""
    runs = [list(plan.steps(start)) for plan in plans]
    together = [[run[number] for run in runs if number < len(run)] for number in range(max(map(len, runs)))]
    return together[:limit]


@settings(deadline=None, max_examples=150)
@given(orders, st.lists(divisions, min_size=1, max_size=4), st.data())
def test_each_sample_comes_exactly_once_an_epoch(
    order: EpochOrder, divided: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Over all ranks, and resumptions with other ranks, batch sizes and ways to end, nothing is lost or doubled."""
    found: list[int] = []
    delivered = 0
    for number, division in enumerate(divided):
        last = number == len(divided) - 1
        steps = in_step(ranks_of(order, division), delivered)
        taken = steps if last else steps[: data.draw(st.integers(0, len(steps)))]
        for ranks in taken:
            assert {step.start for step in ranks} == {delivered}
            assert len({step.stop for step in ranks}) == 1
            delivered = ranks[0].stop
            found += [index for step in ranks for index in step.indices[step.valid].tolist()]
    left = order.num_samples - delivered
    assert found == order.at(np.arange(delivered)).tolist()  # the order's own sequence, and so each once
    assert left < divided[-1]["batch_size"] * divided[-1]["world_size"] if divided[-1]["last"] == "drop" else left == 0


@settings(deadline=None, max_examples=100)
@given(orders, divisions, st.data())
def test_ranks_are_even_where_they_should_be(order: EpochOrder, division: dict[str, Any], data: st.DataObject) -> None:
    """Equal batches on all ranks, fewer repeats than ranks and only at the end; or none at all; counts as foretold."""
    plans = ranks_of(order, division)
    runs = [list(plan.steps()) for plan in plans]
    assert [len(run) for run in runs] == [plan.count() for plan in plans]
    repeats = sum(int((~step.valid).sum()) for run in runs for step in run)
    assert all(step.valid.all() for run in runs for step in run[:-1])
    assert all(0 < len(step.indices) <= division["batch_size"] for run in runs for step in run)
    if division["last"] != "short":
        assert len({tuple(len(step.indices) for step in run) for run in runs}) == 1
    else:
        sizes = [sum(len(step.indices) for step in run) for run in runs]
        assert max(sizes) - min(sizes) <= 1
    if division["last"] == "drop":
        assert {len(step.indices) for run in runs for step in run} <= {division["batch_size"]}
    if division["last"] != "even":
        assert repeats == 0
    assert repeats < division["world_size"]


@settings(deadline=None, max_examples=60)
@given(orders, st.integers(1, 12))
def test_four_ranks_are_one_of_four_times_the_batch(order: EpochOrder, batch_size: int) -> None:
    """Put together by rank, the batches of four ranks are those of a single one, so the order is the same."""
    one = list(EpochPlan(order=order, batch_size=4 * batch_size).steps())
    four = in_step(ranks_of(order, {"batch_size": batch_size, "world_size": 4}), 0)
    assert len(one) == len(four)
    for alone, ranks in zip(one, four, strict=True):
        assert [i for step in ranks for i in step.indices[step.valid].tolist()] == alone.indices.tolist()


def test_steps_do_not_depend_on_how_many_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is asked in chunks; the seams are not to be seen."""
    plan = EpochPlan(order=EpochOrder(num_samples=1_000, shuffle=Blocks(30)), batch_size=7)
    whole = [step.indices.tolist() for step in plan.steps(14)]
    monkeypatch.setattr(loader_plan, "CHUNK", 20)
    assert [step.indices.tolist() for step in plan.steps(14)] == whole


def test_a_plan_over_ten_billion_samples_starts_anywhere() -> None:
    """Nothing that grows with the dataset is computed or held."""
    plan = EpochPlan(order=EpochOrder(num_samples=10**10), batch_size=64, rank=3, world_size=8)
    first = next(plan.steps(5 * 10**9))
    assert (first.start, first.stop) == (5 * 10**9, 5 * 10**9 + 512)
    assert first.indices.tolist() == plan.order.at(5 * 10**9 + 192 + np.arange(64)).tolist()
    assert plan.count() == 19_531_250


def test_ids_are_the_callers_own() -> None:
    """A batch's samples keep no more memory alive than themselves."""
    steps = EpochPlan(order=EpochOrder(num_samples=1_000), batch_size=10).steps()
    assert next(steps).indices.base is None


# -- ranks


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("torch.distributed", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return monkeypatch  # the environment is without ranks already


def test_ranks_are_found(no_ranks: pytest.MonkeyPatch) -> None:
    """What is given counts, then torch.distributed once it is initialised, then the environment, then 0 of 1."""
    assert find_rank(None, None) == (0, 1)
    no_ranks.setenv("RANK", "1")
    no_ranks.setenv("WORLD_SIZE", "2")
    assert find_rank(None, None) == (1, 2)
    ready = {"is": False}
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: ready["is"], get_rank=lambda: 2, get_world_size=lambda: 4
    )
    no_ranks.setitem(sys.modules, "torch.distributed", distributed)
    assert find_rank(None, None) == (1, 2)
    ready["is"] = True
    assert find_rank(None, None) == (2, 4)
    assert find_rank(5, 8) == (5, 8)


def test_ranks_are_those_of_a_real_process_group(tmp_path: Path) -> None:
    """Two processes of torch.distributed are distinguished, also where the environment says otherwise."""
    pytest.importorskip("torch")
    program = """
        import os, sys
        import torch.distributed as distributed
        from mm_assets.loading.plan import find_rank

        assert find_rank(None, None) == (0, 1)
        rank, store = int(sys.argv[1]), distributed.FileStore(sys.argv[2], 2)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        os.environ.update(RANK="5", WORLD_SIZE="8")
        print(*find_rank(None, None), *find_rank(3, 4))
        distributed.barrier()
        distributed.destroy_process_group()
        print(*find_rank(None, None))
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=200)[0] for process in processes]
    assert told == ["0 2 3 4\n5 8\n", "1 2 3 4\n5 8\n"]


@pytest.mark.parametrize(("rank", "world_size"), [(0, None), (None, 2), (2, 2), (-1, 2), (True, 2), (0, 0), ("0", "x")])
def test_half_or_wrong_ranks_are_refused(rank: Any, world_size: Any, no_ranks: pytest.MonkeyPatch) -> None:
    """One of the two, or a rank that is not below the world size, is a `ConfigError`."""
    with pytest.raises(ConfigError, match="arguments: rank, world_size"):
        find_rank(rank, world_size)


@pytest.mark.parametrize(("rank", "world_size"), [("0", None), (None, "2"), ("2", "2"), ("-1", "2"), ("", "2")])
def test_a_wrong_environment_is_refused(rank: str | None, world_size: str | None, no_ranks: pytest.MonkeyPatch) -> None:
    """So it is in the environment, rather than every process taking itself for the only one."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if value is not None:
            no_ranks.setenv(name, value)
    with pytest.raises(ConfigError, match="environment: RANK, WORLD_SIZE"):
        find_rank(None, None)


JOB = {"SLURM_JOB_ID": "7"}
SRUN = {**JOB, "SLURM_STEP_ID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, (3, 8)),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 8)),
        ({**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, (1, 2)),
        ({**JOB, "SLURM_NTASKS": "8"}, (0, 1)),  # the shell of an allocation
        ({**JOB, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),  # the script of a job of one task
        ({**JOB, "SLURM_PROCID": "0"}, (0, 1)),
        (MPIRUN, (1, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, (2, 3)),
        ({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, (1, 2)),
        ({"JAX_PROCESS_ID": "1", "JAX_PROCESS_COUNT": "2"}, (1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4", **MPIRUN}, (1, 4)),
        # torchrun in each of two tasks; mpirun in the script and in a step of a job; processes started by a task
        (
            {"RANK": "5", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
            (5, 8),
        ),
        ({**MPIRUN, **JOB, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (1, 4)),
        ({**MPIRUN, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, (1, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8", **SRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, (5, 8)),
    ],
)
def test_launchers_tell_the_rank(
    environment: dict[str, str], expected: tuple[int, int], no_ranks: pytest.MonkeyPatch
) -> None:
    """The variables of each launcher count, alone and where one launcher runs within another."""
    for name, value in environment.items():
        no_ranks.setenv(name, value)
    assert find_rank(None, None) == expected
    assert find_rank(0, 1) == (0, 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            "rank 0 of 2 .torch.*1 of 2 .SLURM",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "0 of 1 .torch.*1 of 2 .SLURM"),
        ({"RANK": "0", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "0 of 8 .torch.*1 of 2 .SLURM"),
        ({"RANK": "0", "WORLD_SIZE": "4", **MPIRUN}, "0 of 4 .torch.*1 of 4 .Open MPI"),
        ({**MPIRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, "1 of 4 .Open MPI.*1 of 8 .SLURM"),
        ({**MPIRUN, "JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "4"}, "1 of 4 .Open MPI.*0 of 4 .JAX"),
        ({**JOB, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "SLURM_PROCID, SLURM_NTASKS: .*start it with srun"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID, SLURM_NTASKS: found '1' and None"),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "SLURM_PROCID, SLURM_NTASKS: found '2' and '2'"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE: found '0' and None"),
        ({"JAX_PROCESS_COUNT": "2"}, "JAX_PROCESS_ID, JAX_PROCESS_COUNT: found None and '2'"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK, PMI_SIZE: found 'x'"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(
    environment: dict[str, str], message: str, no_ranks: pytest.MonkeyPatch
) -> None:
    """Launchers that disagree, or one that says half, are an error that says who says what; arguments still count."""
    for name, value in environment.items():
        no_ranks.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        find_rank(None, None)
    assert find_rank(3, 4) == (3, 4)


def process_group(rank: int, world_size: int) -> SimpleNamespace:
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: rank,
        get_world_size=lambda: world_size,
    )


def test_process_groups_tell_the_rank(no_ranks: pytest.MonkeyPatch) -> None:
    """jax.distributed counts once it is initialized; it must agree with torch, and one process with no larger job."""
    ready = {"is": False}
    jax = SimpleNamespace(
        distributed=SimpleNamespace(is_initialized=lambda: ready["is"]),
        process_index=lambda: 1,
        process_count=lambda: 2,
    )
    no_ranks.setitem(sys.modules, "jax", jax)
    assert find_rank(None, None) == (0, 1)
    no_ranks.setenv("SLURM_PROCID", "3")
    no_ranks.setenv("SLURM_NTASKS", "4")
    assert find_rank(None, None) == (3, 4)
    ready["is"] = True
    assert find_rank(None, None) == (1, 2)
    no_ranks.setitem(sys.modules, "torch.distributed", process_group(1, 2))
    assert find_rank(None, None) == (1, 2)
    no_ranks.setitem(sys.modules, "torch.distributed", process_group(0, 2))
    with pytest.raises(ConfigError, match=r"0 of 2 .torch.distributed.*1 of 2 .jax.distributed"):
        find_rank(None, None)
    ready["is"] = False
    no_ranks.setitem(sys.modules, "torch.distributed", process_group(0, 1))
    with pytest.raises(ConfigError, match=r"0 of 1 .torch.distributed.*3 of 4 .SLURM"):
        find_rank(None, None)
    no_ranks.setitem(sys.modules, "jax", SimpleNamespace())  # an early release has no way to ask
    no_ranks.delenv("SLURM_PROCID")
    assert find_rank(None, None) == (0, 1)
