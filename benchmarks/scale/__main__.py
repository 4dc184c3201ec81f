"""What a load of very many partitions costs beside the work on the partitions themselves.

The real driver, registry, recorder, manifest, sensor and `clean`, with a worker that publishes partitions without
working on them: for each number of partitions, each storage and each database, the measures of `measures.py`, each in a
process of its own. Prints a JSON object for each; at the end, to standard error, a table of those that matter.

    python -m benchmarks.scale --data FOLDER [--numbers 1000,10000] [--storage local,s3] [--database sqlite,postgres]

Linux; Debian's package `postgresql` for that database. In FOLDER it takes 11 files for each partition with the storage
`local`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scale.datasets import (
    Local,
    Place,
    Remote,
    declared,
    key_of,
    make_dataset,
    publish_again,
    publish_one,
    withdraw_one,
    write_manifest,
)
from benchmarks.scale.measures import CHANGED, MEASURES, Case, measured
from benchmarks.scale.postgres import Postgres, postgres
from benchmarks.scale.s3 import Service, serve

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_CHANGED = 10  # shards before a tick
DELAY_SECONDS = 0.02  # of a request to the S3 server
FIGURES = (  # of the table: measure, fewest partitions, figure, and the most that it may be; None says no limit
    ("partition", 0, "requests", 15),
    ("load of one", 0, "requests", 35),
    ("load", 1_000, "ms per partition", None),
    ("load", 1_000, "processor ms per partition", None),
    ("load", 1_000, "database bytes per partition", None),
    ("no-op load", 100_000, "requests", 230),
    ("no-op load", 100_000, "seconds", None),
    ("no-op load", 100_000, "peak MB", None),
    ("manifest of one new", 100_000, "seconds", None),
    ("open manifest", 100_000, "seconds", 2),
    ("open manifest", 100_000, "peak MB", 300),
    ("graph", 1_000, "seconds", None),
    ("clean records", 100_000, "seconds", 600),
    ("clean files", 100_000, "seconds", 600),
)


@dataclass
class Bench:
    """Measures one case, whose load is the first of them.

    Attributes:
        case: the dataset.
        file: the case for other processes.
        environment: of these processes.
        s3: the server that has the dataset, or None.
        database: the server that has the events, or None.
        log: if each request is printed.
    """

    case: Case
    file: Path
    environment: Mapping[str, str]
    s3: Service | None
    database: Postgres | None
    log: bool = False

    def prepare(self, what: str) -> None:
        """Changes the dataset as a measure needs it."""
        dataset = declared(self.case.place)
        if what in ("partition", "load of one", "manifest of one new"):
            withdraw_one(dataset)
        if what in ("load of one", "manifest of one new"):
            self.run("manifest")
        if what == "manifest of one new":
            publish_one(declared(self.case.place))
        if what == "tick of ten changed":
            self.case.place.change_shards([key_of(number) for number in range(1, NUM_CHANGED + 1)])
        if what == "clean records":
            dataset = declared(self.case.place, **CHANGED)
            publish_again(self.case.place, dataset)
            self.case.place.age(dataset)

    def run(self, what: str) -> dict[str, float]:
        """Makes one measure: figures by name."""
        before = self._used()
        self._requests()
        command = [sys.executable, "-m", "benchmarks.scale", "--measure", what, "--case", str(self.file)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(self.environment), cwd=REPOSITORY
        )
        if done.returncode:
            raise SystemExit(f"{what} failed:\n{done.stdout}\n{done.stderr}")
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        if self.s3 is not None:
            requests = self._requests()
            figures["requests"] = len(requests)
            figures |= Counter(request.partition(" ")[0] for request in requests)
            if self.log:
                print(what, *requests, sep="\n  ", file=sys.stderr)
        if what == "load":
            figures |= {name: value - before[name] for name, value in self._used().items()}
            figures["database bytes per partition"] = figures["database bytes"] / figures["partitions run"]
        return figures

    def _used(self) -> dict[str, int]:
        """Returns what Dagster's databases have taken so far, of SQLite's their bytes."""
        if self.database is not None:
            return self.database.used()
        files = [path for path in Path(self.environment["DAGSTER_HOME"]).rglob("*.db*") if path.is_file()]
        return {"database bytes": sum(path.stat().st_size for path in files)}

    def _requests(self) -> list[str]:
        return [] if self.s3 is None else self.s3.log()


@contextmanager
def bench(
    folder: Path, number: int, storage: str, database: str, delay: float = DELAY_SECONDS, engine: str = "stub"
) -> Iterator[Bench]:
    """Makes a dataset of registered partitions, and an instance; without an engine all are published, else one."""
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
        dataset, template = make_dataset(place, number, published=None if engine == "none" else 1)
        if engine == "none":
            write_manifest(dataset, template)
        case, file = Case(place=place, template=template, folder=folder, engine=engine), folder / "case"
        case.write(file)
        environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
        yield Bench(case=case, file=file, environment=environment, s3=s3, database=server)


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of the figures that matter, beside the most that they may be."""
    lines = ["| measure | storage | partitions | at most | measured |", "| --- | --- | ---: | ---: | ---: |"]
    for measure, number, figure, goal in FIGURES:
        of_measure = [one for one in results if one["measure"] == measure and figure in one]
        for one in [one for one in of_measure if one["partitions"] >= number]:
            where = f"{measure}, {figure} | {one['storage']} | {one['partitions']:,}"
            lines.append(f"| {where} | {'' if goal is None else f'{goal:,}'} | {_rounded(one[figure])} |")
    return lines


def _rounded(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def main() -> None:
    """Prints the figures of each measure, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an empty folder")
    parser.add_argument("--numbers", default="1000,10000", help="of partitions")
    parser.add_argument("--storage", default="local,s3")
    parser.add_argument("--database", default="sqlite,postgres")
    parser.add_argument(
        "--engine",
        choices=("stub", "processes", "none"),
        default="stub",
        help="of the load: processes does the work; none makes no load, and Dagster knows of no partition",
    )
    parser.add_argument("--delay", type=float, default=DELAY_SECONDS, help="seconds of a request to the S3 server")
    parser.add_argument("--measures", default=",".join(MEASURES), help="only these, after a load")
    parser.add_argument("--log", action="store_true", help="print each request to standard error")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure, Case.read(arguments.case))))
        return
    if arguments.data is None:
        parser.error("--data FOLDER is needed")
    chosen = [what for what in MEASURES if what in arguments.measures.split(",")]
    results = []
    for number in map(int, arguments.numbers.split(",")):
        for storage in arguments.storage.split(","):
            for database in arguments.database.split(","):
                folder = arguments.data / f"{number}-{storage}-{database}"
                with bench(folder, number, storage, database, arguments.delay, arguments.engine) as one:
                    one.log = arguments.log
                    first = () if arguments.engine == "none" else ("load",)
                    for what in (*first, *(what for what in chosen if what != "load")):
                        one.prepare(what)
                        case = {"measure": what, "partitions": number, "storage": storage, "database": database}
                        results.append({**case, **one.run(what)})
                        print(json.dumps(results[-1]), flush=True)
    print(*table(results), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
