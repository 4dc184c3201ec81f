"""A process that does one thing for one candidate, and prints what came of it as a line of JSON.

python -m benchmarks.loading.child measure ROW '{"candidate": …}'
python -m benchmarks.loading.child pack full|tiny|stored|large '{"candidate": …}'
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.loading.adapters.base import Unsupported
from benchmarks.loading.corpus import Corpus
from benchmarks.loading.rows import ROWS, Task

TINY_SAMPLES = 64

RESULT = "RESULT "  # what the line begins with: projects print too


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it: a value, or why there is none.

    Attributes:
        value: in the row's unit; of packing, 0.
        version: the candidate's package and its version, where it has one.
        unsupported: why the candidate does not do this.
        failed: the error that ended it.
    """

    value: float | None = None
    version: str | None = None
    unsupported: str | None = None
    failed: str | None = None


def _pack(kind: str, task: Task) -> float:
    folder = Path(task.folder)
    folder.mkdir(parents=True, exist_ok=True)
    adapter = task.adapter()
    corpus = Corpus(Path(task.corpus))
    if kind == "stored":
        adapter.pack_at_size(corpus)
    elif kind == "large":
        adapter.pack_large(task.num_large)
    else:
        adapter.pack(corpus[:TINY_SAMPLES] if kind == "tiny" else list(corpus))
    return 0.0


def run(action: str, what: str, task: Task) -> Outcome:
    """Do it.

    Args:
        action: ``measure`` or ``pack``.
        what: the row; or which files.
        task: for whom.
    """
    try:
        if action == "pack":
            value = _pack(what, task)
        else:
            measure = ROWS[what].measure
            if measure is None:
                raise Unsupported("is not measured in a process")
            value = measure(task)
        package = task.adapter().package
        return Outcome(value=value, version=f"{package} {metadata.version(package)}" if package else None)
    except Unsupported as reason:
        return Outcome(unsupported=str(reason))
    except ModuleNotFoundError as error:
        return Outcome(unsupported=f"is not installed here ({error})")


def main() -> None:
    """Run, print, and leave without waiting for other projects' workers."""
    action, what, task = sys.argv[1:]
    try:
        outcome = run(action, what, Task(**json.loads(task)))
    except Exception as error:  # noqa: BLE001  # whatever a project raises is its result, and goes into the report
        traceback.print_exc()
        outcome = Outcome(failed=f"{type(error).__name__}: {error}")
    found = {name: getattr(outcome, name) for name in Outcome.__slots__}
    print(RESULT + json.dumps(found), flush=True)
    sys.stderr.flush()
    # Worker processes of loaders that are not closed would be joined by their destructors, some for seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
