"""What a load of very many partitions costs beside the work on the partitions themselves.

The real driver, registry, recorder, manifest and sensor, with a worker that publishes partitions without working on
them: for each number of partitions, each storage and each database, a load of all of them, a load with nothing to do, a
manifest of one new partition, and a tick of the sensor after ten shards changed. Each in a process of its own.

    python -m benchmarks.scale --data FOLDER [--numbers 1000,10000] [--storage local,s3] [--database sqlite,postgres]

Linux; Debian's package `postgresql` for that database. It takes about 100 ms for each partition, and in FOLDER 15 files
for each with the storage `local`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.datasets import Local, Place, Remote, declared, key_of, make_dataset, publish_one, withdraw_one
from benchmarks.scale.measures import MEASURES, Case, measured
from benchmarks.scale.postgres import Postgres, postgres
from benchmarks.scale.s3 import Service, serve

REPOSITORY = Path(__file__).resolve().parents[2]
CHANGED = 10  # shards before a tick
DELAY = 0.02  # seconds of a request to the S3 server


@dataclass
class Bench:
    """Measures one case, whose load is the first of them.

    Attributes:
        case: the dataset.
        file: the case for other processes.
        environment: of these processes.
        s3: the server that has the dataset, or None.
        database: the server that has the events, or None.
    """

    case: Case
    file: Path
    environment: Mapping[str, str]
    s3: Service | None
    database: Postgres | None

    def prepare(self, what: str) -> None:
        """Changes the dataset as a measure wants it."""
        dataset = declared(self.case.place)
        if what == "manifest of one new":
            withdraw_one(dataset)
            self.run("manifest")
            publish_one(declared(self.case.place))
        elif what == "tick of ten changed":
            self.case.place.change_shards([key_of(number) for number in range(1, CHANGED + 1)])

    def run(self, what: str) -> dict[str, float]:
        """One measure: figures by name."""
        before = self._used()
        command = [sys.executable, "-m", "benchmarks.scale", "--measure", what, "--case", str(self.file)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(self.environment), cwd=REPOSITORY
        )
        if done.returncode:
            raise SystemExit(f"{what} failed:\n{done.stdout}\n{done.stderr}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        after = self._used()
        found |= {name: after[name] - before.get(name, 0) for name in after}
        return found

    def _used(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.s3 is not None:
            requests = self.s3.requests()
            moved = {name: requests.pop(name, 0) for name in ("bytes in", "bytes out")}
            self._requests.update(requests)
            found |= {"requests": sum(requests.values()), **moved}
            found = self._summed(found)
        if self.database is not None:
            found |= self.database.used()
        return found

    def __post_init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._requests: dict[str, int] = {}

    def _summed(self, found: Mapping[str, float]) -> dict[str, float]:
        """The server counts since it was asked the last time."""
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0) + value
        return dict(self._sums)


@contextmanager
def bench(
    folder: Path, number: int, storage: str, database: str, delay: float = DELAY, engine: str = "stub"
) -> Iterator[Bench]:
    """Makes a dataset of registered partitions, of which one is published, and an instance."""
    folder.mkdir(parents=True)
    home = folder / "home"
    home.mkdir()
    with ExitStack() as opened:
        s3 = opened.enter_context(serve(delay)) if storage == "s3" else None
        server = opened.enter_context(postgres()) if database == "postgres" else None
        settings = "telemetry: {enabled: false}\n"
        if server is not None:
            settings += f"storage: {{postgres: {{postgres_url: '{server.url}'}}}}\n"
        (home / "dagster.yaml").write_text(settings)
        place: Place = Remote(s3.url) if s3 is not None else Local(folder)
        _, template = make_dataset(place, number, published=1)
        case, file = Case(place=place, template=template, folder=folder, engine=engine), folder / "case"
        case.write(file)
        environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        yield Bench(case=case, file=file, environment=environment, s3=s3, database=server)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an empty folder")
    parser.add_argument("--numbers", default="1000,10000", help="of partitions")
    parser.add_argument("--storage", default="local,s3")
    parser.add_argument("--database", default="sqlite,postgres")
    parser.add_argument("--engine", choices=("stub", "processes"), default="stub", help="processes does the work")
    parser.add_argument("--delay", type=float, default=DELAY, help="seconds of a request to the S3 server")
    parser.add_argument("--measures", default=",".join(MEASURES), help="only these; a load is made in any case")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, Case.read(arguments.case))))
        return
    if arguments.data is None:
        parser.error("--data FOLDER is needed")
    wanted = [what for what in MEASURES if what in arguments.measures.split(",")]
    for number in map(int, arguments.numbers.split(",")):
        for storage in arguments.storage.split(","):
            for database in arguments.database.split(","):
                folder = arguments.data / f"{number}-{storage}-{database}"
                with bench(folder, number, storage, database, arguments.delay, arguments.engine) as found:
                    for what in dict.fromkeys(("load", *wanted)):
                        found.prepare(what)
                        case = {"partitions": number, "storage": storage, "database": database, "measure": what}
                        print(json.dumps({**case, **found.run(what)}), flush=True)


if __name__ == "__main__":
    main()
