"""Reading ahead by itself: results in order, a bounded number of them, threads that end, memory that comes back."""

import gc
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from mm_assets.dataset.prefetch import BufferPool, Prefetch, arrays_of
from mm_assets.fields import ArraySpec


def numbers(count: int, done: list[int]) -> Iterator[Callable[[], int]]:
    """Tasks that give 0, 1, …, the earlier ones the slower; those that began are listed in `done`."""

    def task(number: int) -> int:
        done.append(number)
        threading.Event().wait(0.002 * (number % 3 == 0))
        return number

    return (partial(task, number) for number in range(count))


@pytest.mark.parametrize(("threads", "depth"), [(0, 1), (1, 1), (2, 2), (3, 8), (4, 1)])
def test_results_come_in_order(threads: int, depth: int) -> None:
    """With any number of threads, results are those of the tasks in their order, and the end comes once."""
    ends: list[str] = []
    ahead = Prefetch(numbers(30, []), threads=threads, depth=depth, on_end=lambda: ends.append("end"))
    assert list(ahead) == list(range(30))
    ahead.close()
    ahead.close()
    del ahead
    assert ends == ["end"]


def test_tasks_in_flight_are_bounded() -> None:
    """At most `depth` tasks are begun before the results before them are taken."""
    done: list[int] = []
    ahead = Prefetch(numbers(30, done), threads=2, depth=3, on_end=lambda: None)
    for taken in range(10):
        assert next(ahead) == taken
        assert len(done) <= taken + 3
    ahead.close()
    assert list(ahead) == []


def test_a_failed_task_is_raised_at_its_place() -> None:
    """The results before it come first; asked again, those behind it do."""

    def fail() -> int:
        raise ValueError("two")

    tasks: list[Callable[[], int]] = [lambda: 0, lambda: 1, fail, lambda: 3]
    ahead = Prefetch(iter(tasks), threads=2, depth=4, on_end=lambda: None)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(ahead)
    assert list(ahead) == [3]
    ahead.close()


def test_an_interrupt_while_waiting_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that was being waited for is still the next one."""
    ready = threading.Event()

    def slow() -> int:
        ready.wait(30)
        return 0

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    ahead = Prefetch(iter([slow, lambda: 1]), threads=1, depth=2, on_end=lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(ahead)
    ready.set()
    assert list(ahead) == [0, 1]
    ahead.close()


def test_an_unreferenced_reader_ends() -> None:
    """A reader that is dropped without `close` ends by itself and calls `on_end`."""
    ended, begun, go_on = threading.Event(), threading.Event(), threading.Event()
    done: list[int] = []

    def slow() -> int:
        begun.set()
        go_on.wait(30)
        return 0

    def tasks() -> Iterator[Callable[[], int]]:
        yield lambda: 0
        yield slow
        yield from numbers(1000, done)

    gc.disable()  # reference counting alone must find it
    try:
        ahead = Prefetch(tasks(), threads=1, depth=50, on_end=ended.set)
        assert next(ahead) == 0
        assert begun.wait(30)
        del ahead
        assert not ended.is_set()
        go_on.set()
        assert ended.wait(30)
    finally:
        gc.enable()
    assert done == []


def test_arrays_are_of_their_layouts() -> None:
    """Shapes and dtypes are those asked for, those of parts and empty ones too, and all can be written to."""
    layouts = {
        "image": ArraySpec((4, 3), np.dtype(np.uint8)),
        "pair": {"ids": ArraySpec((4, 2), np.dtype(np.int32)), "none": ArraySpec((0, 2), np.dtype(np.float32))},
    }
    arrays = arrays_of(layouts, BufferPool(keep=2, least=0).take)
    assert (arrays["image"].shape, arrays["image"].dtype) == ((4, 3), np.uint8)
    pair = arrays["pair"]
    assert (pair["ids"].dtype, pair["none"].shape, pair["none"].dtype) == (np.int32, (0, 2), np.float32)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in (arrays["image"], *pair.values()))


def take(pool: BufferPool, *shape: int) -> np.ndarray:
    return pool.take(shape or (300, 250), np.dtype(np.uint8))


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[1:, ::-1], lambda a: a.reshape(-1).view(np.int8)[3:]])
def test_memory_is_released_with_the_last_view(view: Callable[[Any], Any]) -> None:
    """While an array or any view of it is held its memory is not reused; then the next one gets it."""
    pool = BufferPool(keep=2)
    held = view(take(pool))
    held[...] = 7
    other = take(pool)
    other[...] = 1
    assert not np.shares_memory(held, other)
    assert (held == 7).all()
    address = other.ctypes.data
    del other
    assert take(pool).ctypes.data == address


def test_memory_is_used_again_for_another_shape() -> None:
    """Sizes that round up to one power of two share memory, whatever their shape and dtype; others do not."""
    pool = BufferPool(keep=2)
    address = take(pool).ctypes.data
    assert pool.take((20_000,), np.dtype(np.float32)).ctypes.data == address
    small, large = take(pool, 70_000), take(pool, 140_000)
    assert not np.shares_memory(small, large)
    assert large.ctypes.data != address


def test_tensors_hold_memory_too() -> None:
    """What torch made of an array, without copying, keeps it from being used again."""
    torch = pytest.importorskip("torch")
    pool = BufferPool(keep=2)
    tensor = torch.from_numpy(take(pool))[1:]
    tensor[...] = 7
    other = take(pool)
    other[...] = 1
    assert (tensor == 7).all()


def test_cached_memory_is_bounded() -> None:
    """Of what comes back, the newest few are kept; what comes back later than the pool goes is let go."""
    tracemalloc.start()
    try:
        pool = BufferPool(keep=2)
        held = [take(pool, 1 << 20) for _ in range(5)]
        held.clear()
        assert tracemalloc.get_traced_memory()[0] >> 20 == 2
        held = [take(pool, 1 << 20) for _ in range(5)]
        del pool
        held.clear()
        assert tracemalloc.get_traced_memory()[0] >> 20 == 0
    finally:
        tracemalloc.stop()
