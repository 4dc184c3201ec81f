"""`mm-assets run`: every pending partition, from shards to a manifest."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click

from mm_assets.cli.completion import complete_stages
from mm_assets.cli.document import json_option, write_document, write_error
from mm_assets.cli.losses import totals_document
from mm_assets.cli.options import DatasetChoice, dataset_options, partition_option
from mm_assets.cli.output import (
    echo,
    named_in_part,
    print_next,
    printable,
    report_losses,
    report_missing_streams,
    report_planned,
    report_registration,
    wait_for_shards,
)
from mm_assets.cli.progress import LoadProgress, stderr_of_its_own
from mm_assets.cli.run_summary import (
    MAX_ROWS,
    manifest_url,
    next_steps,
    print_manifests,
    print_summary,
    summary_counts,
)
from mm_assets.errors import ConfigError, MmAssetsError, meant
from mm_assets.summaries import counted

if TYPE_CHECKING:
    from mm_assets.cli.metrics import LoadMetrics
    from mm_assets.orchestration.interrupts import Stop
    from mm_assets.pipeline.chain import Stage
    from mm_assets.pipeline.load.engine import Engine, Task
    from mm_assets.pipeline.load.tasks import PartitionRun
    from mm_assets.pipeline.partition.run import PartitionReport
    from mm_assets.pipeline.spec import DatasetSpec, EngineOptions
    from mm_assets.pipeline.state.claims import Slice
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.losses import Losses
    from mm_assets.pipeline.state.registration import Registration
    from mm_assets.pipeline.state.staleness import DatasetState

_SHOWN = 10  # partitions that are listed after a signal
_NAMED = 50  # partitions in the command that continues
ENGINES = ("processes", "ray")


@click.command()
@dataset_options(undeclared=True)
@partition_option("Run these partitions, pending or not.")
@click.option("--partitions-from", "file", type=click.File(), metavar="FILE", help="The same, a key in each line.")
@click.option("--jobs", "-j", type=click.IntRange(1), help="Partitions at a time. Default: 1, or as `engine` declares.")
@click.option("--engine", type=click.Choice(ENGINES), help="Where they run. Default: as declared, else processes.")
@click.option(
    "--address", metavar="HOST:PORT", help="Head of the Ray cluster. Default: as declared, else $RAY_ADDRESS."
)
@click.option(
    "--from",
    "stage",
    metavar="STAGE",
    shell_complete=complete_stages,
    help="Start at this stage, or at an earlier one that is stale: every partition, or those of --partition.",
)
@click.option("--force", is_flag=True, help="Start at the first stage: every partition, or those of --partition.")
@click.option("--slice", "part", metavar="K/N", help="Run one of N parts of the partitions, by hashes of their keys.")
@click.option(
    "--no-record", is_flag=True, help="Use no Dagster instance, make no manifest: `mm-assets sync` does later."
)
@click.option(
    "--no-wait", is_flag=True, help="Leave partitions that another load has claimed to it, and do not wait for it."
)
@click.option("--dry-run", is_flag=True, help="Dry run: list what would run, from which stage and why; write nothing.")
@click.option(
    "--metrics",
    metavar="FILE|PORT",
    help="Prometheus metrics: serve them on a PORT of 127.0.0.1, or on HOST:PORT, or write them to a FILE.",
)
@click.option("--verbose", "-v", is_flag=True, help="A line on standard error for each stage that begins.")
@json_option
def command(
    chosen: DatasetChoice,
    keys: tuple[str, ...],
    file: IO[str] | None,
    jobs: int | None,
    engine: str | None,
    address: str | None,
    stage: str | None,
    force: bool,
    part: str | None,
    no_record: bool,
    no_wait: bool,
    dry_run: bool,
    metrics: str | None,
    verbose: bool,
) -> None:
    """Register the shards, run every pending partition from its first stale stage on, make the manifests."""
    from mm_assets.pipeline.state.claims import Slice

    keys = _chosen_keys(keys, file)
    given = {
        name: value for name, value in (("type", engine), ("address", address), ("jobs", jobs)) if value is not None
    }
    run = _Run(
        chosen=chosen,
        keys=keys,
        engine=given,
        first=_first_stage(stage, force=force),
        part=None if part is None else Slice.parse(part),
        is_recorded=not no_record,
        waits=not no_wait,
        verbose=verbose,
    )
    with ExitStack() as opened:
        if metrics is not None and not dry_run:
            from mm_assets.cli.metrics import LoadMetrics

            run.metrics = opened.enter_context(LoadMetrics(metrics))
        _carry_out(run, dry_run=dry_run)
    if run.failed:
        sys.exit(1)


def _with_engine(spec: DatasetSpec, given: Mapping[str, Any]) -> DatasetSpec:
    """The declaration with the settings of its engine that the options give."""
    if not given:
        return spec
    is_other = given.get("type", spec.engine.type) != spec.engine.type
    engine = {**spec.engine.model_dump(exclude={"address", "jobs"} if is_other else None), **given}
    if "address" in given and engine.get("type") != "ray":
        raise ConfigError("arguments", "--address", "is of a Ray cluster: give --engine ray too")
    return spec.replace(engine=engine)


def _expect_shared_root(specs: Iterable[DatasetSpec]) -> None:
    """Raises `ConfigError` for a root below $DAGSTER_HOME: other hosts, which run other parts, do not see it."""
    from mm_assets.pipeline.dagster_home import default_root

    for spec in specs:
        if "MM_ASSETS_ROOT" not in os.environ and spec.root == default_root():
            detail = f"of {spec.name} is {spec.root}, which each host has for itself"
            advice = "give --root, or set MM_ASSETS_ROOT, to what all hosts share"
            raise ConfigError("arguments", "--root", f"{detail}: {advice}")


def _carry_out(run: _Run, *, dry_run: bool) -> None:
    from mm_assets.orchestration.interrupts import Stopped, stoppable

    if dry_run:
        run.register(dry_run=True)
        run.announce()
        return
    with stoppable(run.abandon) as stop:
        try:
            run.register()
            run.execute(stop)
            stop.check()
        except Stopped as stopped:
            run.abandon(stopped.signum)
    run.report()


def _chosen_keys(keys: Iterable[str], file: IO[str] | None) -> tuple[str, ...]:
    """The partitions that the options name, each once.

    Raises:
        ConfigError: there is a file, and it names none; without a name all that are pending would run.
    """
    listed = [] if file is None else [key for line in file if (key := line.strip())]
    if file is not None and not listed:
        raise ConfigError("arguments", "--partitions-from", f"{file.name} names no partition: write a key in each line")
    return tuple(dict.fromkeys([*keys, *listed]))


def _first_stage(stage: str | None, *, force: bool) -> Stage | None:
    """The stage that the options name.

    Raises:
        ConfigError: there is no such stage, or both options are given.
    """
    from mm_assets.pipeline.chain import RAW_SHARDS
    from mm_assets.pipeline.state.staleness import stage_named

    if force and stage is not None:
        raise ConfigError("arguments", "--force", f"is the same as --from {RAW_SHARDS.name}: give one of them")
    return RAW_SHARDS if force else None if stage is None else stage_named(stage, option="--from")


@dataclass(kw_only=True)
class _Run:
    """What one command does, as far as it has come.

    Attributes:
        chosen: the datasets that it was given.
        keys: the partitions that it was given; none means those that are pending, or with a `first` stage all.
        engine: settings of `engine` that it was given.
        first: the stage that it was given.
        part: the part of the partitions that it was given; None runs all.
        verbose: whether each stage that begins has a line.
        is_recorded: whether Dagster records the partitions, and the manifest is made.
        waits: whether it waits for partitions that other loads have claimed.
        datasets: by name, those that are registered.
        found: of each, what registration found.
        present: of each, what there was before the first run; then what its manifest lists.
        pending: of each, the partitions that were pending then.
        work: the partitions to run.
        ended: how runs ended.
        failed: what went wrong, one line each.
        warned: what the checks of the manifests found, one line each.
        manifests: names of the datasets whose manifest was made.
        counts: of the first partitions that ran well, by dataset and key, what the summary has a heading for.
        sums: of each dataset, the same numbers of all that ran well.
        losses: of each dataset, what the partitions that ran well lost.
        changes: of each dataset, the partitions that registration found to be new, changed or gone.
        published: names of the datasets that had published partitions before.
        rebuilt: of each dataset, the published partitions that ran again because of a missing file, with the file.
        began: when the first run was started.
        metrics: the metrics of the loads, if they are exported.
    """

    chosen: DatasetChoice
    keys: tuple[str, ...]
    engine: Mapping[str, Any]
    first: Stage | None
    part: Slice | None
    is_recorded: bool
    waits: bool
    verbose: bool
    datasets: dict[str, DatasetStore] = field(default_factory=dict)
    found: dict[str, Registration] = field(default_factory=dict)
    present: dict[str, DatasetState] = field(default_factory=dict)
    pending: dict[str, set[str]] = field(default_factory=dict)
    work: list[tuple[DatasetSpec, str]] = field(default_factory=list)
    ended: list[PartitionRun] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    manifests: list[str] = field(default_factory=list)
    counts: dict[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    sums: dict[str, Counter[str]] = field(default_factory=dict)
    losses: dict[str, Losses] = field(default_factory=dict)
    changes: dict[str, Mapping[str, list[str]]] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    rebuilt: dict[str, Mapping[str, str]] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    metrics: LoadMetrics | None = None
    _abandoned: threading.Lock = field(default_factory=threading.Lock)
    _stderr: int = field(default_factory=lambda: os.dup(2))  # while a step runs, Dagster redirects the standard one

    def register(self, *, dry_run: bool = False) -> None:
        """Registers the shards and finds the partitions to run."""
        from mm_assets.pipeline.dagster_home import ensure_dagster_home, is_prepared
        from mm_assets.pipeline.state.folder import DatasetStore
        from mm_assets.pipeline.state.registration import register
        from mm_assets.pipeline.state.staleness import DatasetState, chosen_partitions, stage_named

        needs_instance = self.is_recorded and not dry_run
        specs = [_with_engine(spec, self.engine) for spec in self.chosen.specs(read_only=not needs_instance)]
        if self.first is not None:
            stage_named(self.first.name, option="--from", specs=specs)
        if self.part is not None or not self.is_recorded:
            _expect_shared_root(specs)
        if needs_instance and not is_prepared(ensure_dagster_home()):
            from mm_assets.orchestration.launch import prepare_home

            prepare_home()
        for spec in specs:
            wait = wait_for_shards(spec)
            try:
                dataset = DatasetStore(spec)
                found = register(dataset, wait=True, dry_run=dry_run, sleep=wait)
            except MmAssetsError as error:
                if len(specs) == 1:
                    raise
                self.failed.append(f"{spec.name}: {error}")  # one dataset's trouble is not the others'
                continue
            self.datasets[spec.name] = dataset
            report_registration(self.chosen, spec, found)
            self.found[spec.name] = found
            # The stored schema has more than the decision: the evidence for it.
            schema = found.decision.schema if dry_run and found.decision is not None else None
            present = DatasetState(dataset, schema, partitions={p.key: p for p in found.partitions})
            changes = {"new": list(found.added), "changed": list(found.changed), "gone": list(found.removed)}
            self.changes[spec.name] = changes
            if dry_run:
                said = ", ".join(f"{len(keys):,} {what}" for what, keys in changes.items() if keys)
                echo(f"{spec.name}: " + (f"would register partitions: {said}" if said else "no shard changed"))
            self.present[spec.name] = present
            if any(map(present.is_published, present.partitions)):
                self.published.add(spec.name)
            self.pending[spec.name] = {key for key in present.incomplete if self._is_in_part(key)}
            chosen = chosen_partitions(present, self.keys, self.first)
            self.work += [(spec, key) for key in chosen if self._is_in_part(key)]
        missing = [key for key in self.keys if not any(key in found.partitions for found in self.present.values())]
        if missing:
            names = ", ".join(spec.name for spec in specs)
            known = (key for found in self.present.values() for key in found.partitions)
            detail = f"{missing[0]!r} is not a registered partition of {names}{meant(missing[0], known)}"
            raise ConfigError("arguments", "--partition", detail)

    def announce(self) -> None:
        """Prints what would be done."""
        from mm_assets.pipeline.state.staleness import planned_runs

        document: dict[str, Any] = {}
        for name, present in self.present.items():
            planned = planned_runs(present, [key for spec, key in self.work if spec.name == name], self.first)
            document[name] = {
                "partitions": len(present.partitions),
                "registration": self.changes[name],
                "planned": {
                    key: {"first": stale.first.name, "reason": stale.message} for key, stale in planned.items()
                },
                "makes_manifest": self.is_recorded,
            }
            report_planned(name, planned)
            number, manifest = counted(len(present.partitions), "partition"), " and make the manifest"
            if planned:
                said = f"would run {len(planned):,} of {number}" + (manifest if self.is_recorded else "")
            else:
                said = f"would run none of {number}: nothing is pending"
            echo(f"{name}: {said}")
        for line in self.failed:
            echo(f"failed: {self.chosen.complete(line)}", err=True)
        echo("dry run: nothing was registered, run or written")
        write_document({"dry_run": True, "datasets": document, "failed": self.failed})

    def execute(self, stop: Stop) -> None:
        """Runs the partitions of each dataset and makes its manifest."""
        self.began = time.perf_counter()
        names = [name for name in self.datasets if not self._has_nothing_to_do(name)]
        if not names:
            return
        from mm_assets.orchestration.recorded_load import run_load
        from mm_assets.pipeline.load.engine_choice import open_engine
        from mm_assets.pipeline.load.tasks import PartitionRun, load_partitions
        from mm_assets.pipeline.state.claims import Claims
        from mm_assets.pipeline.state.registration import registration_fault

        left = Counter(spec.name for spec, _ in self.work)
        with (
            stderr_of_its_own() as stream,
            LoadProgress(total=len(self.work), stream=stream, verbose=self.verbose) as progress,
            ExitStack() as opened,
        ):
            engines: dict[EngineOptions, Engine] = {}  # one for the datasets that declare the same

            metrics = self.metrics

            def started(task: Task, stage: str) -> None:
                progress.started(task.spec.name, task.partition.key, stage)
                if metrics is not None and not stage:
                    metrics.started(task)

            def observe(result: PartitionRun) -> None:
                if not result.ok:
                    stop.check()  # of a partition that a signal interrupted
                if metrics is not None:
                    metrics.partition_ended(result)
                self._note(result)
                stop.check()
                if len(self.ended) > progress.total:  # one is rebuilt
                    progress.total += 1
                progress.ended(result)
                left[result.dataset] -= 1
                if not left[result.dataset] and self.is_recorded:
                    progress.begin(f"{result.dataset}: recording it, making the manifest")

            def end_of(name: str, report: PartitionReport) -> None:
                observe(PartitionRun.of(name, report))

            def print_line(name: str, line: str) -> None:
                print(printable(f"{name}: {self.chosen.complete(line)}"), file=stream, flush=True)

            for name in names:
                dataset, keys = self.datasets[name], [key for spec, key in self.work if spec.name == name]
                options = dataset.spec.engine
                if options not in engines:
                    engine = opened.enter_context(open_engine(options, jobs=1, most=len(self.work), started=started))
                    engines[options] = engine if metrics is None else metrics.observed(engine)
                if metrics is not None:
                    metrics.begin(name, len(keys))
                progress.begin("")
                engine, present = engines[options], self.present.pop(name)
                given: dict[str, Any] = {
                    "engine": engine,
                    "first": self.first,
                    "part": self.part,
                    "waits": self.waits,
                    "report": partial(print_line, name),
                }
                if not self.is_recorded:
                    with Claims(dataset, str(uuid.uuid4())) as claims:
                        ended = partial(end_of, name)
                        if refusal := load_partitions(present, keys, claims=claims, ended=ended, **given).refusal:
                            self.failed.append(f"{name}: {refusal}")  # what was done before is reported
                    stop.check()
                    if (fault := registration_fault(dataset, present.partitions, keys)) is not None:
                        self.failed.append(f"{name}: {fault}")
                    if not keys:  # nothing has changed
                        self.present[name] = present
                    continue
                found = self.found[name]
                rest = run_load(dataset.spec, keys, observed=observe, present=present, found=found, **given)
                if rest.state is not None:
                    self.present[name] = rest.state
                stop.check()
                self.manifests.append(name)
                self.rebuilt[name] = rest.rebuilt
                self.failed += [f"{name}: {line}" for line in rest.failures]
                self.warned += [f"{name}: {line}" for line in rest.warnings]

    def _has_nothing_to_do(self, name: str) -> bool:
        """Whether no partition of a dataset is to run, its manifest is the newest one, and Dagster knows all of it."""
        from mm_assets.orchestration.recorded import is_recorded
        from mm_assets.pipeline.dagster_home import find_dagster_home
        from mm_assets.pipeline.state.exports import write_indexes
        from mm_assets.pipeline.state.manifests import current_manifest, manifest_warnings

        present = self.present[name]
        if not self.is_recorded or any(spec.name == name for spec, _ in self.work):
            return False
        try:
            manifest = current_manifest(present)
            if manifest is None or not is_recorded(find_dagster_home(), present, self.found[name]):
                return False
            write_indexes(present.dataset, present.published())
        except MmAssetsError:  # the load reports it
            return False
        if self.metrics is not None:
            self.metrics.begin(name, 0)
        self.manifests.append(name)
        self.warned += [f"{name}: {line}" for line in manifest_warnings(manifest)]
        return True

    def _note(self, result: PartitionRun) -> None:
        """Takes up how a partition ended; of its records, of which a load has very many, only numbers."""
        from mm_assets.pipeline.state.losses import sum_losses

        self.ended.append(replace(result, records={}, losses={}))
        if result.ok and result.records:
            self.losses[result.dataset] = sum_losses([self.losses.get(result.dataset, {}), result.losses])
            counts = summary_counts(self.datasets[result.dataset], result.records)
            self.sums.setdefault(result.dataset, Counter()).update(counts)
            if len(self.counts) < MAX_ROWS:
                self.counts[result.dataset, result.partition] = counts

    def report(self) -> None:
        """Prints what was done and what went wrong."""
        from mm_assets.pipeline.state.added_streams import carried_over
        from mm_assets.pipeline.state.losses import loss_totals, losses_command
        from mm_assets.pipeline.state.staleness import DatasetState, pending_reasons

        self.failed += [f"{r.dataset}/{r.partition}: {line}" for r in self.ended for line in r.failures]
        present = {name: self.present.get(name) or DatasetState(dataset) for name, dataset in self.datasets.items()}
        pending = {
            name: {key: fault for key, fault in pending_reasons(found).items() if self._is_in_part(key)}
            for name, found in present.items()
        }
        mine = {name: [key for key in found.partitions if self._is_in_part(key)] for name, found in present.items()}
        seconds = time.perf_counter() - self.began
        document = {name: self._document(found, mine[name], pending[name]) for name, found in present.items()}
        print_summary(present, mine, self.ended, self.counts, self.sums, pending, seconds)
        if self.is_recorded:
            print_manifests(present)
        else:
            names = " ".join(f"--dataset {shlex.quote(name)}" for name in self.datasets)
            sync = self.chosen.complete(f"`mm-assets sync {names}`")
            echo(f"not recorded in Dagster, and no manifest was made: {sync} does both")
        for name, rebuilt in self.rebuilt.items():
            if rebuilt:
                number = counted(len(rebuilt), "published partition")
                echo(f"{name}: files of {number} were missing or damaged: {named_in_part(list(rebuilt))} ran again")
        for name in self.datasets:
            ran = [result for result in self.ended if result.dataset == name]
            failed_keys = [result.partition for result in ran if not result.ok]
            totals = loss_totals(present[name], failed_keys, [self.losses.get(name, {})])
            document[name]["losses"] = totals_document(totals)
            if ran:
                report_losses(self.chosen, name, totals)
            if totals:
                echo(f"all of them: {self.chosen.complete(f'`{losses_command(name)}`')}")
            report_missing_streams(self.chosen, name, carried_over(present[name], present[name].listed).missing)
        for (name, line), keys in self._warnings().items():
            number = "" if len(keys) == 1 else f"{counted(len(keys), 'partition')}: "
            place = f"{name}/{keys[0]}" if len(keys) == 1 else name
            echo(f"warning: {place}: {number}{self.chosen.complete(line)}", err=True)
        all_warned = [*self.warned, *(self._left_out(pending) if self.is_recorded else ())]
        warned, failed = list(map(self.chosen.complete, all_warned)), list(map(self.chosen.complete, self.failed))
        for kind, lines in (("warning", warned), ("failed", failed)):
            for line in lines:
                echo(f"{kind}: {line}", err=True)
        if not failed:
            print_next(self._next_steps(present))
        ended = {(result.dataset, result.partition) for result in self.ended}
        if left := [(spec.name, key) for spec, key in self.work if (spec.name, key) not in ended]:
            self._print_continuation(left)
        facts = {"seconds": round(seconds, 3), "warnings": warned, "failed": failed}
        write_document({"dry_run": False, "datasets": document, **facts})

    def _next_steps(self, present: Mapping[str, DatasetState]) -> list[str]:
        """Returns what to do after the first run of a dataset."""
        from mm_assets.cli.project import project_folder

        first_runs = {name: found for name, found in present.items() if name not in self.published and self.is_recorded}
        steps = next_steps(first_runs)
        if steps and self.chosen.shards is not None:
            (name,) = first_runs
            project = "" if project_folder(Path.cwd()) else " --project"
            command = self.chosen.complete(f"`mm-assets init --dataset {shlex.quote(name)}{project}`")
            steps.append(f"{command} declares the dataset in a project")
        return steps

    def _document(self, present: DatasetState, keys: Sequence[str], pending: Mapping[str, str]) -> dict[str, Any]:
        """A dataset's part of the document, without its losses."""
        name = present.dataset.spec.name
        sums = self.sums.get(name, Counter())
        ran = {
            result.partition: {
                "status": result.status.lower(),
                "failures": list(result.failures),
                "warnings": list(result.warnings),
            }
            for result in self.ended
            if result.dataset == name
        }
        return {
            "partitions": len(keys),
            "registration": self.changes[name],
            "ran": ran,
            "rebuilt": dict(self.rebuilt.get(name, {})),
            "pending": dict(pending),
            "totals": {heading: count for heading, count in sums.items() if heading != "faults"},
            "faults": sums["faults"],
            "manifest": manifest_url(present) if self.is_recorded else None,
        }

    def _is_in_part(self, key: str) -> bool:
        return self.part is None or key in self.part

    def _warnings(self) -> dict[tuple[str, str], list[str]]:
        """The partitions of each dataset with the same warning, such as that of a setting."""
        found: dict[tuple[str, str], list[str]] = {}
        for result in self.ended:
            for line in result.warnings:
                found.setdefault((result.dataset, line), []).append(result.partition)
        return found

    def _left_out(self, pending: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
        """For each dataset the partitions that did not run and are not in its manifest, by the reason."""
        for name, faults in pending.items():
            ran = {result.partition for result in self.ended if result.dataset == name}
            by_reason: dict[str, list[str]] = {}
            for key, fault in faults.items():
                if key not in ran:
                    by_reason.setdefault(fault, []).append(key)
            again = f"`mm-assets run --dataset {name}`"
            for fault, left in islice(by_reason.items(), _SHOWN):
                number = counted(len(left), "partition")
                yield f"{name}: {number} not in the manifest ({named_in_part(left)}): {fault}: {again}"
            more = sum(map(len, islice(by_reason.values(), _SHOWN, None)))
            if more:
                yield f"{name}: {more:,} more not in the manifest, for other reasons: {again}"

    def abandon(self, signum: int) -> NoReturn:
        """Prints what was done before a signal came, and how to continue, and ends the process at once.

        It is called in another thread if the work does not end: nothing of it is visible, since files appear whole.
        """
        with self._abandoned:  # the process ends in the block
            try:
                os.dup2(self._stderr, 2)
                self._report_stop(signum)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(128 + signum)

    def _report_stop(self, signum: int) -> None:
        from mm_assets.pipeline.state.staleness import pending_partitions

        pending = {name: set(pending_partitions(dataset)) for name, dataset in self.datasets.items()}
        for result in self.ended:
            for line in result.failures:
                echo(f"failed: {result.dataset}/{result.partition}: {self.chosen.complete(line)}", err=True)
        done = {(result.dataset, result.partition) for result in self.ended if result.ok}
        left = [
            (spec.name, key)
            for spec, key in self.work
            if key in pending[spec.name] or (key not in self.pending[spec.name] and (spec.name, key) not in done)
        ]
        name = signal.Signals(signum).name
        said = f"{len(self.work) - len(left)} of {counted(len(self.work), 'partition')} done"
        kept = [dataset for dataset in self.datasets if dataset not in self.manifests and self.is_recorded]
        manifest = "the manifest is" if len(self.datasets) == 1 else f"the manifests of {', '.join(kept)} are"
        line = f"stopped by {name}: {said}" + (f", {manifest} as before" if kept else "")
        echo(line, err=True)
        write_error("Stopped", line, 128 + signum)
        for dataset, key in left[:_SHOWN]:
            echo(f"  not done: {dataset}/{key}", err=True)
        if len(left) > _SHOWN:
            echo(f"  and {len(left) - _SHOWN} more", err=True)
        self._print_continuation(left)

    def _print_continuation(self, left: Sequence[tuple[str, str]]) -> None:
        for words in self._left_commands(left):
            again = " ".join(["mm-assets run", *words])
            echo(f"to continue: {self.chosen.complete(f'`{again}`')}", err=True)

    def _left_commands(self, left: Sequence[tuple[str, str]]) -> Iterator[list[str]]:
        """The options of the commands that run what is left, and nothing that is done; quoted for a shell."""
        start = [] if self.first is None else ["--from", self.first.name]
        names = (("--engine", "type"), ("--address", "address"), ("--jobs", "jobs"))
        jobs = [word for option, name in names if name in self.engine for word in (option, str(self.engine[name]))]
        jobs += [] if self.part is None else ["--slice", str(self.part)]
        jobs += [] if self.is_recorded else ["--no-record"]
        given = [word for name in self.chosen.names for word in ("--dataset", shlex.quote(name))]
        if not self.ended or not (self.keys or start):  # the same command: it runs what is pending, or nothing is done
            yield [*given, *_partition_options(self.keys), *start, *jobs]
            return
        for name in self.datasets:
            keys = [key for dataset, key in left if dataset == name]
            dataset = given if len(self.datasets) == 1 else ["--dataset", shlex.quote(name)]
            if keys:
                yield [*dataset, *_partition_options(keys), *start, *jobs]
            elif name not in self.manifests and self.is_recorded:
                yield [*dataset, *jobs]


def _partition_options(keys: Sequence[str]) -> list[str]:
    """Options that name partitions, quoted for a shell; many are in a file, which is made."""
    if len(keys) <= _NAMED:
        return [word for key in keys for word in ("--partition", shlex.quote(key))]
    with tempfile.NamedTemporaryFile("w", prefix="mm-assets-left-", suffix=".txt", delete=False) as file:
        file.writelines(f"{key}\n" for key in keys)
    return ["--partitions-from", shlex.quote(file.name)]
