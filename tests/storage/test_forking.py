"""Locks in forked children."""

import os
import threading

import pytest

from mm_assets.dataset.workers import WorkerPool
from mm_assets.storage.forking import renew_in_children

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        renew_in_children(self)

    def renew_locks(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("taken", [Holder, WorkerPool])
def test_a_lock_held_at_fork_is_free_in_the_child(taken: type) -> None:
    """A child can take a lock that a thread of its parent holds; in the parent it stays held."""
    holder = taken()
    lock = holder.lock if isinstance(holder, Holder) else holder._lock
    with lock:
        child = os.fork()
        if child == 0:
            found = holder.lock if isinstance(holder, Holder) else holder._lock
            os._exit(0 if found.acquire(timeout=60) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert lock.locked()
