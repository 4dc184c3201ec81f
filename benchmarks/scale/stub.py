"""An engine whose one worker process publishes partitions without working on them: what is left is the driver."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import connection
from queue import Empty, Queue

from benchmarks.scale.datasets import Place, Template
from mm_assets.pipeline.chain import PUBLISHED
from mm_assets.pipeline.load.engine import Ended, Running, Task
from mm_assets.pipeline.state.folder import DatasetStore

__all__ = ["Stub"]

_AT_ONCE = 16  # partitions that are published together


class Stub:
    """Workers as an engine has them, as far as the driver sees: tasks and reports are pickled and cross a pipe.

    Args:
        place: where the dataset is.
        template: the reports.
        slots: tasks at work at a time.
    """

    spans_hosts = False  # no partition takes long
    group_bytes = 32 << 20

    def __init__(self, place: Place, template: Template, slots: int) -> None:
        self.slots = slots
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, place, template), daemon=True)
        self._process.start()
        theirs.close()
        self._at_work: dict[str, Task] = {}

    def fits(self, task: Task) -> bool:
        """True: nothing is made."""
        return True

    def submit(self, tasks: Sequence[Task]) -> None:
        """Sends tasks to the worker."""
        self._at_work |= {task.partition.key: task for task in tasks}
        self._pipe.send(tuple(tasks))

    def submit_copy(self, task: Task, of: Task) -> bool:
        """False: there is one worker."""
        return False

    def running(self, task: Task) -> Running | None:
        """None: tasks do not take long."""
        return None

    def ended(self, timeout: float | None) -> Iterable[Ended]:
        """Those that ended, as `Engine.ended`."""
        found = []
        while self._pipe.poll(timeout if not found else 0):
            report = self._pipe.recv()
            found.append(Ended(task=self._at_work.pop(report.partition), report=report))
        return found

    def cancel(self, task: Task) -> None:
        """Tasks end at once: there is nothing to end."""

    def close(self) -> None:
        """Ends the worker."""
        self._pipe.close()
        self._process.join()


def _work(theirs: connection.Connection, place: Place, template: Template) -> None:
    tasks: Queue[Task | None] = Queue()
    # The driver sends tasks whether or not it has read the reports.
    threading.Thread(target=_receive, args=(theirs, tasks), daemon=True).start()
    while (first := tasks.get()) is not None:
        group = [first]
        with suppress(Empty):
            while len(group) < _AT_ONCE and (other := tasks.get_nowait()) is not None:
                group.append(other)
        made_with = PUBLISHED.digest(first.spec, first.schema)
        recipes = {task.partition.key: task.partition.recipe(made_with) for task in group}
        place.publish(DatasetStore(first.spec), template, recipes)
        for key, recipe in recipes.items():
            theirs.send(template.report_of(key, recipe))


def _receive(theirs: connection.Connection, tasks: Queue[Task | None]) -> None:
    with suppress(EOFError):
        while True:
            for task in theirs.recv():
                tasks.put(task)
    tasks.put(None)
