"""Commands of `mm-assets` on one or several hosts, over small shards whose partitions note where they run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mm_assets.pipeline.chain import TABLES

from ..pipeline.shards import make_shard, png

WAIT = 300.0  # for what takes seconds on an idle machine
PUBLISHED = ("records", *TABLES, "packed", "streams")  # folders
MAIN = "from mm_assets.cli.main import main; main(prog_name='mm-assets')"


class Note(NamedTuple):
    """A partition that was at work: when, which, where."""

    when: float
    key: str
    host: str


class Corpus:
    """Shards, and notes about them, that several projects share: what they make is equal then.

    Args:
        folder: for the notes, and unless said otherwise for the shards.
        number: of the shards.
        shards: folder or URL where they are; they are made if this is empty.
        environment: of every host.
    """

    def __init__(
        self, folder: Path, number: int, *, shards: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        self.number = number
        self.notes = folder / "notes"
        self.notes.mkdir(parents=True)
        self.environment = dict(environment or {})
        self.shards = shards or str(folder / "shards")
        if not shards:
            make_shards(folder / "shards", number)

    def order(self, **orders: object) -> None:
        """Forgets the notes, and says how long partitions take, as `Noting` reads it."""
        for path in self.notes.iterdir():
            path.unlink()
        (self.notes / ".orders").write_text(json.dumps(orders))

    def noted(self) -> list[Note]:
        """Every note since then, the oldest first."""
        paths = [path for path in self.notes.iterdir() if path.name[0] != "."]
        # The time is the file system's: the clock of a host may be wrong.
        return sorted(Note(path.stat().st_mtime, *path.read_text().split()) for path in paths)


class Project:
    """A root of a corpus, and commands that fill it.

    Args:
        corpus: the shards.
        folder: for homes of Dagster, and unless said otherwise for the root; made if it is missing.
        root: folder or URL of the root.
    """

    def __init__(self, corpus: Corpus, folder: Path, *, root: str = "") -> None:
        self.folder = folder
        self.root = root or str(folder / "root")
        (folder / "logs").mkdir(parents=True)
        filters = [{"type": "noting_filters:Noting", "folder": str(corpus.notes)}]
        self.given = ["--shards", f"{corpus.shards}/*.tar", "--set", f"filters={json.dumps(filters)}"]
        self.environment = corpus.environment

    def command(self, *arguments: str, prefix: tuple[str, ...] = (), code: str = MAIN) -> list[str]:
        """A command over the dataset; `prefix` may be that of `as_host`."""
        return [*prefix, sys.executable, "-c", code, *arguments, "--root", self.root, *self.given]

    def start(
        self, *arguments: str, home: str = "home", environment: Mapping[str, str] | None = None, **given: Any
    ) -> "Command":
        """Starts a command with a home of Dagster of its own, in a process group of its own."""
        (self.folder / home).mkdir(exist_ok=True)
        log = self.folder / "logs" / f"{len(list((self.folder / 'logs').iterdir()))}.log"
        variables = {**os.environ, **self.environment, **(environment or {}), "DAGSTER_HOME": str(self.folder / home)}
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(*arguments, **given), env=variables, stdout=output, stderr=output, start_new_session=True
            )
        return Command(process, log)

    def run(self, *arguments: str, home: str = "home", **given: Any) -> str:
        """Runs a command to its end, which must be good; its output."""
        with self.start(*arguments, home=home, **given) as command:
            return command.ended()

    def published(self) -> dict[str, str]:
        """Returns what no process may change once it is there: records and files that are named by content."""
        return {name: digest for name, digest in self.contents().items() if Path(name).parts[1] in PUBLISHED}

    def records(self) -> list[str]:
        """Returns the key of each record, sorted."""
        names = (Path(name) for name in self.contents())
        return sorted(name.stem.rpartition(".")[0] for name in names if name.parts[1] == "records")

    def published_at(self) -> list[float]:
        """Returns when each record was created, by the clock of the storage, sorted."""
        if "://" in self.root:
            found = self._objects().items()
            return sorted(facts["LastModified"].timestamp() for name, facts in found if "/records/" in name)
        return sorted(path.stat().st_mtime for path in Path(self.root).glob("*/records/*.json"))

    def contents(self) -> dict[str, str]:
        """Returns the MD5 digest of every file in the root that has the same bytes wherever it was made."""
        if "://" in self.root:
            digests = {name: facts["ETag"].strip('"') for name, facts in self._objects().items()}
            return {name: digest for name, digest in digests.items() if is_compared(Path(name))}
        folder = Path(self.root)
        names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        return {str(name): hashlib.md5((folder / name).read_bytes()).hexdigest() for name in names if is_compared(name)}

    def _objects(self) -> dict[str, Any]:
        """Returns what an object store reports about each file of the root."""
        prefix = self.root.partition("://")[2] + "/"
        found = object_files(self.environment["AWS_ENDPOINT_URL"]).find(prefix, detail=True)
        return {name.removeprefix(prefix): facts for name, facts in found.items()}


class Command:
    """A command that was started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(WAIT)

    def kill(self) -> None:
        """Kills it, if it has not ended, and none of the processes that it started."""
        self.process.kill()
        self.process.wait(WAIT)

    def signal(self, number: int) -> None:
        """Sends a signal to it and to the processes that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ended(self, code: int = 0) -> str:
        """Waits for its end; its output."""
        assert self.process.wait(WAIT) == code, self.said
        return self.said


def object_files(endpoint: str) -> Any:
    """The file system of an object store."""
    import fsspec

    return fsspec.filesystem("s3", key="test", secret="test", endpoint_url=endpoint, use_listings_cache=False)


def is_compared(name: Path) -> bool:
    """Whether a file of a root has the same bytes wherever it was made."""
    varies = name.parts[1] in ("attempts", "cache", "claims", "clean.json", "manifests")
    return not varies and not any(part[0] == "." for part in name.parts)


def make_shards(folder: Path, number: int) -> None:
    """Shards whose members are named as those notes expect."""
    for at in range(number):
        key = f"{at:03}"
        members = {
            f"{key}-{i}.{kind}": png(at * 3 + i) if kind == "png" else f"words of {key}-{i}"
            for i in range(3)
            for kind in ("png", "txt")
        }
        make_shard(folder / f"{key}.tar", members)


def wait_for(condition: Callable[[], object], what: str, seconds: float = WAIT) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen in {seconds:.0f} seconds: {what}"
        time.sleep(0.05)
