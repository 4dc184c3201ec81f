"""Make the shards, take them in by every candidate in rounds, report.

    python -m benchmarks.ingest --data DIR [--rounds 5] [--kinds jpeg,tiff] [--candidates stages,run] [--curator PYTHON]

Linux, and 4 GB in DIR. `--curator` is an interpreter with ``nemo-curator[...]==1.4.0`` and Pillow installed; without it
that project's candidates are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.ingest.corpus import KINDS, make_shards
from benchmarks.ingest.report import Measurement, report
from benchmarks.ingest.usage import measure
from benchmarks.ingest.work import CANDIDATES, settings
from benchmarks.loading.pages import read_again

REPOSITORY = Path(__file__).resolve().parents[2]
CURATOR = ("curator lazy", "curator eager", "curator ray")
LEAST_WRITTEN = 0.5  # of the bytes of the shards: a candidate that writes fewer has not done the work
COMMAND = "from mm_assets.cli.main import main; main()"  # of this checkout, installed or not
ALL = (*CANDIDATES, "run", *CURATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measures one candidate on one kind at a time, each in a fresh process with the shards in the page cache.

    Attributes:
        folder: for the shards and what is made of them.
        decodable: how media are judged, `headers` or `full`.
        curator: an interpreter that has NeMo Curator, or None.
        log: a file for what the processes write to standard error.
    """

    folder: Path
    decodable: str
    curator: str | None
    log: Path

    def measure(self, kind: str, candidate: str, round_: int, shards: Sequence[Path]) -> Measurement:
        """One measurement; a candidate that fails has a code and no numbers."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        read_again(shards)
        os.sync()  # what was written before must not slow down what is measured
        usage, code, output = measure(self._command(candidate, out, shards), log=self.log, environment=self._variables)
        written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        if code == 0 and written < LEAST_WRITTEN * sum(path.stat().st_size for path in shards):
            raise SystemExit(f"{candidate} ended well and wrote only {written:,} bytes: see {self.log}")
        inside: dict[str, Any] = {}
        if code == 0 and candidate != "run":
            inside = json.loads(output.splitlines()[-1])
        shutil.rmtree(out)
        return Measurement(
            kind=kind,
            candidate=candidate,
            round=round_,
            code=code,
            shard_bytes=sum(path.stat().st_size for path in shards),
            num_shards=len(shards),
            out_bytes=written,
            inside=inside,
            **asdict(usage),
        )

    @property
    def _variables(self) -> dict[str, str]:
        variables = {"DAGSTER_HOME": str(self.folder / "out" / "home"), "PYTHONPATH": str(REPOSITORY)}
        variables["PYTHONDONTWRITEBYTECODE"] = ""  # the code that is measured is compiled once
        if self.curator is not None:  # it starts the program `ray` of the same environment
            variables["PATH"] = f"{Path(self.curator).parent}:{os.environ['PATH']}"
        return variables

    def _command(self, candidate: str, out: Path, shards: Sequence[Path]) -> list[str]:
        named = list(map(str, shards))
        if candidate in CANDIDATES:
            return [sys.executable, "-m", "benchmarks.ingest.work", candidate, self.decodable, str(out), *named]
        if candidate == "run":
            (out / "home").mkdir()
            options = ["--shards", str(shards[0].parent), "--root", str(out / "root"), "--dataset", "ingest"]
            for name, value in settings(self.decodable).items():
                options += ["--set", f"{name}={json.dumps(value)}"]
            return [sys.executable, "-c", COMMAND, "run", *options, "--jobs", "2"]
        assert self.curator is not None
        script = REPOSITORY / "benchmarks" / "ingest" / "curator.py"
        return [self.curator, str(script), candidate.removeprefix("curator "), str(out / "parquet"), *named]


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return wanted

    return parse


def main() -> int:
    """Runs the benchmark; 1 where a candidate failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingest", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder for the shards and what is made of them")
    parser.add_argument("--out", type=Path, help="file of the report; by default one in the data folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of samples or bytes per shard")
    parser.add_argument("--decodable", choices=("headers", "full"), default="headers")
    parser.add_argument("--kinds", type=_names(list(KINDS)), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--candidates", type=_names(ALL), default=list(ALL), help=", ".join(ALL))
    parser.add_argument("--curator", help="interpreter that has NeMo Curator")
    parser.add_argument("--report-only", action="store_true", help="of results that are there")
    arguments = parser.parse_args()
    folder = arguments.data.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.jsonl"
    if arguments.curator is None:
        arguments.candidates = [name for name in arguments.candidates if name not in CURATOR]
    if not arguments.report_only:
        results.unlink(missing_ok=True)
        bench = Bench(folder=folder, decodable=arguments.decodable, curator=arguments.curator, log=folder / "log.txt")
        for kind in arguments.kinds:
            shards = make_shards(folder / "shards", kind, scale=arguments.scale)
            for number in range(arguments.rounds):
                turn = number % len(arguments.candidates)
                for candidate in arguments.candidates[turn:] + arguments.candidates[:turn]:
                    found = bench.measure(kind, candidate, number, shards)
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(found)) + "\n")
                    print(f"{kind} {candidate} {number}: {found.seconds:.2f} s, code {found.code}", file=sys.stderr)
    measurements = [Measurement(**json.loads(line)) for line in results.read_text().splitlines()]
    text = report(measurements)
    (arguments.out or folder / "report.md").write_text(text)
    print(text)
    return int(any(one.code for one in measurements))


if __name__ == "__main__":
    sys.exit(main())
