"""Coverage-guided fuzzing of everything that reads bytes from outside: ``python -m tests.fuzz --seconds 60``.

Each target runs in a process of its own for its share of the time, from the corpus of the runs before it. An input that
raises an undocumented exception, takes longer than 5 seconds, or more than 2 GiB of memory ends the run with its path.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_SECONDS = 5  # of one input
MAX_MEMORY = 2048  # MiB of the process
MAX_INPUT = 1 << 16  # bytes
FINDINGS = Path("artifacts") / "fuzz"


def fuzz(name: str, corpus: Path, seconds: int) -> None:
    """Fuzzes one target in this process, which ends with the run."""
    import atheris

    with atheris.instrument_imports(include=["mm_assets"]):
        from .targets import TARGETS
    target = TARGETS[name]
    for seed in target.seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    FINDINGS.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={MAX_SECONDS}",
        f"-rss_limit_mb={MAX_MEMORY}",
        f"-max_len={MAX_INPUT}",
        f"-artifact_prefix={FINDINGS / name}-",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()


def names() -> list[str]:
    """The names of all targets."""
    from .targets import TARGETS

    return list(TARGETS)


def main() -> int:
    """Fuzzes every target in turn; the exit code is the number of targets with findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--corpus", type=Path, default=FINDINGS / "corpus", help="folder of inputs, which grows")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        fuzz(given.targets[0], given.corpus, given.seconds)
    wrong = 0
    chosen = given.targets or names()
    for name in chosen:
        corpus = given.corpus / name
        corpus.mkdir(parents=True, exist_ok=True)
        seconds = max(given.seconds // len(chosen), 1)
        with tempfile.TemporaryDirectory(prefix="mm-assets-fuzz-") as scratch:
            done = subprocess.run(
                [sys.executable, "-m", "tests.fuzz", "--one", name, "--seconds", str(seconds), "--corpus", str(corpus)],
                env={**os.environ, "TMPDIR": scratch},
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=seconds + 600,
            )
        runs = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
        covered = re.findall(r"cov: (\d+)", done.stderr)
        memory = re.search(r"peak_rss_mb:\s*(\d+)", done.stderr)
        print(
            f"{name:24} {runs[1] if runs else '?':>9} inputs  {covered[-1] if covered else '?':>6} branches  "
            f"{memory[1] if memory else '?':>5} MiB  {'ok' if done.returncode == 0 else 'FOUND SOMETHING'}",
            flush=True,
        )
        if done.returncode != 0:
            wrong += 1
            raised = done.stdout.partition("=== Uncaught Python exception: ===")[2]
            print(f"exit code {done.returncode}\n{raised or done.stderr[-2000:]}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
