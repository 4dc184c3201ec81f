"""The job `<dataset>_load`, with which Dagster starts a load."""

import dagster as dg

from mm_assets.errors import MmAssetsError
from mm_assets.orchestration.interrupts import sigterm_kept
from mm_assets.orchestration.load_runs import LoadConfig, load_job
from mm_assets.orchestration.observed_shards import log_skipped
from mm_assets.orchestration.partitions import load_job_name
from mm_assets.orchestration.recorded_load import RecordedLoad
from mm_assets.orchestration.resources import open_dataset
from mm_assets.orchestration.runs import claimed_run, live_runs
from mm_assets.orchestration.shown import failure_of, shown_cause
from mm_assets.pipeline.load.engine_choice import open_engine
from mm_assets.pipeline.load.processes import num_processors
from mm_assets.pipeline.spec import DatasetSpec
from mm_assets.pipeline.state.claims import Claims
from mm_assets.pipeline.state.folder import DatasetStore
from mm_assets.pipeline.state.registration import register
from mm_assets.pipeline.state.staleness import DatasetState, chosen_partitions, stage_named

__all__ = ["build_load_job"]


def build_load_job(spec: DatasetSpec) -> dg.JobDefinition:
    """The job `<dataset>_load`, which registers the shards first."""

    def drive(context: dg.OpExecutionContext, config: LoadConfig) -> None:
        dataset = open_dataset(context, spec)
        try:
            # Before the shards are listed, which may take long: other hosts see by its claim that the run is alive.
            with claimed_run(context, dataset) as claims:
                failure = run(context, config, dataset, claims)
        except MmAssetsError as error:
            raise failure_of(error) from shown_cause(error)
        if failure is not None:
            raise failure

    def run(
        context: dg.OpExecutionContext, config: LoadConfig, dataset: DatasetStore, claims: Claims
    ) -> dg.Failure | None:
        found = register(dataset, allow_empty=True)
        log_skipped(context.log, found)
        live_runs(context.instance, dataset, load_job_name(spec))  # it ends the dead ones
        first = stage_named(config.first_stage, option="first_stage", specs=[spec]) if config.first_stage else None
        state = DatasetState(dataset)
        keys = config.partitions or chosen_partitions(state, first=first)
        # The first attempt of a run that is repeated may have done a part.
        if config.only_pending or (context.run.parent_run_id and first is None):
            pending = set(state.incomplete)
            keys = [key for key in keys if key in pending]
        if not keys:
            context.log.info("no partition is pending")
        options = spec.engine.model_copy(update={"jobs": config.jobs} if config.jobs else {})
        with sigterm_kept():
            opened = open_engine(options, jobs=num_processors(), most=len(keys))
        recorded = RecordedLoad(state, context.run_id, found, context=context, keys=keys)
        with opened as engine:
            recorded.run(claims=claims, engine=engine, first=first, waits=config.waits)
        return recorded.runs.failure(recorded.runs.own)

    return load_job(spec, drive, pool=spec.pool)
