"""Make the samples, pack them in every format, measure in rounds, report.

    python -m benchmarks.loading --data DIR [--rounds 5] [--samples 20000] [--rows a,b] [--candidates a,b]

Linux, 30 GB in DIR for 20,000 samples, and the packages of ``benchmarks/loading/requirements.txt``; a candidate whose
package is not installed is left out, and said to be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.loading.bench import Bench, Measurement, all_candidates
from benchmarks.loading.corpus import make_corpus
from benchmarks.loading.report import number, write_report
from benchmarks.loading.rows import ROWS


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        unknown = [name for name in wanted if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return wanted

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder for the samples and every candidate's files")
    parser.add_argument("--out", type=Path, help="folder for results and report; by default one in the data folder")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a rate is measured; decoding, three times")
    parser.add_argument("--large", type=int, default=0, help="samples of the files that are only opened; 0 for none")
    parser.add_argument("--rows", type=_names(list(ROWS)), default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--candidates", type=_names(all_candidates()), default=all_candidates())
    parser.add_argument("--report-only", action="store_true", help="of results that are there")
    arguments = parser.parse_args()
    if not arguments.large:
        arguments.rows = [name for name in arguments.rows if ROWS[name].files != "large"]
    return arguments


def main() -> int:
    """Run the bench; 1 where a candidate failed."""
    arguments = _arguments()
    folder = arguments.data.resolve() / f"{arguments.samples}-samples"
    out = (arguments.out or folder / "report").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    corpus = make_corpus(folder / "corpus", arguments.samples)
    if not arguments.report_only:
        bench = Bench(
            folder,
            corpus,
            arguments.candidates,
            seconds=arguments.seconds,
            num_large=arguments.large,
            log=out / "log.txt",
        )
        _measure(arguments, bench, results)
    measurements = _read(results)
    samples = f"{len(corpus):,} samples of image, caption and sound, {corpus.num_bytes / 1e9:.2f} GB."
    print(write_report(out, measurements, samples=samples))
    return int(any(one.outcome.failed for one in measurements))


def _read(results: Path) -> list[Measurement]:
    lines = results.read_text().splitlines() if results.exists() else []
    return [Measurement.from_json(line) for line in lines]


def _measure(arguments: argparse.Namespace, bench: Bench, results: Path) -> None:
    needed = {ROWS[name].files for name in arguments.rows}
    for files in ["tiny", "full", *sorted(needed - {"full"})]:
        begin = time.monotonic()
        for candidate, outcome in bench.prepare(files):
            said = outcome.unsupported or outcome.failed or f"{time.monotonic() - begin:.1f} s"
            print(f"pack {files}: {candidate}: {said}", file=sys.stderr)
            begin = time.monotonic()
    others = [one for one in _read(results) if one.row not in arguments.rows]  # so that rows can be measured in parts
    with results.open("w") as file:
        file.writelines(one.to_json() + "\n" for one in others)
        for turn in range(arguments.rounds):
            for one in bench.round(turn, arguments.rows):
                file.write(one.to_json() + "\n")
                file.flush()
                outcome = one.outcome
                said = outcome.unsupported or f"failed: {outcome.failed}"
                if outcome.value is not None:
                    said = f"{number(outcome.value)} {ROWS[one.row].unit}"
                print(f"round {turn + 1}, {one.row}: {one.candidate}: {said}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
