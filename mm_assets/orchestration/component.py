"""`ShardDataset`: a Dagster Component. One document of a defs.yaml is one dataset with all of its definitions.

Its keys are those of `DatasetSpec`: Dagster's tools (`dg check yaml`, the component's page in the UI, completion in an
editor) get its JSON schema, and a declaration is checked by it once its templates are resolved.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import dagster as dg
from pydantic import BaseModel, RootModel, model_validator

from mm_assets.errors import ConfigError
from mm_assets.orchestration.build import build_definitions
from mm_assets.pipeline.dagster_home import default_root
from mm_assets.pipeline.spec import DatasetSpec

__all__ = ["ShardDataset", "wrong_declarations_left_out"]

WRONG_DECLARATIONS = "wrong_declarations"  # group of the assets that show the errors of declarations

_VALIDATION = "DAGSTER_IS_DEFS_VALIDATION_CLI"  # "1" in `dg check defs`
_logger = logging.getLogger(__name__)
_LEFT_OUT: ContextVar[bool] = ContextVar("wrong_declarations_left_out", default=False)
# In the JSON of a value; between its quotes the template is all of the value, which is null without the variable.
_VARIABLE = re.compile(r'("?)\{\{ *env(?:\.(\w+)|\(\W+(\w+)\W+\)) *\}\}("?)')


def _options(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas of the types that a value may have; pydantic adds null where the key may be left out."""
    return [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]


def _allow_templates(schema: Mapping[str, Any], *, optional: bool) -> dict[str, Any]:
    """A JSON schema that also takes a template (``{{ env.BUCKET }}``) and, for an optional value, null.

    The alternatives are an ``if`` and not an ``anyOf``, so that a validator names the wrong key inside of a value.
    """
    options = _options(schema)
    allowed = {key: value for part in (schema, *options) for key, value in part.items() if key != "anyOf"}
    if "properties" in allowed:
        required = allowed.get("required", ())
        allowed["properties"] = {
            name: _allow_templates(value, optional=name not in required)
            for name, value in allowed["properties"].items()
        }
    if "items" in allowed:
        allowed["items"] = _allow_templates(allowed["items"], optional=False)
    if "type" in allowed:
        kinds = [option["type"] for option in options]
        of_text = {key: allowed.pop(key) for key in ("enum", "pattern") if key in allowed}
        allowed["type"] = list(dict.fromkeys([*kinds, "string", *(["null"] if optional else [])]))
        allowed["if"] = {"type": "string", "not": {"pattern": r"\{\{"}}
        allowed["then"] = {"type": kinds[0] if len(kinds) == 1 else kinds, **of_text}
    return allowed


class _Attributes(RootModel[dict[str, Any]]):
    """Attributes as the YAML gives them, before templates are resolved."""

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The schema of `DatasetSpec`, with templates, and with a default for `root`."""
        schema = DatasetSpec.model_json_schema()
        schema["required"].remove("root")
        definitions = {name: _allow_templates(value, optional=True) for name, value in schema["$defs"].items()}
        return {**_allow_templates(schema, optional=False), "type": "object", "$defs": definitions}


class _Parameters(RootModel[dict[str, Any]]):
    """Settings for `dg scaffold defs`: options for those of one value, all of them in its ``--json-params``."""

    root: dict[str, Any] = {}

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings of `DatasetSpec` that have one value."""
        settings = DatasetSpec.model_json_schema()["properties"]
        single = ("string", "number", "integer", "boolean")
        return {"properties": {name: s for name, s in settings.items() if _options(s)[0].get("type") in single}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Refuses settings that would not load, before anything is written."""
        DatasetSpec.from_config({"name": "dataset", **self.root}, where="arguments", default_root=default_root())
        return self


class _DatasetScaffolder(dg.Scaffolder[_Parameters]):
    """Writes a defs.yaml with the given settings."""

    @classmethod
    def get_scaffold_params(cls) -> type[_Parameters]:
        """The options of `dg scaffold defs`."""
        return _Parameters

    def scaffold(self, request: dg.ScaffoldRequest[_Parameters]) -> None:
        """Writes the file; a dataset without a name has the folder's, as far as names allow its characters."""
        name = re.sub(r"[^A-Za-z0-9_]", "_", request.target_path.name).lstrip("_0123456789") or "dataset"
        dg.scaffold_component(request, {"name": name, **request.params.root})


@dg.scaffold_with(_DatasetScaffolder)
class ShardDataset(dg.Component):
    """A dataset of shards: assets, checks, jobs, sensors and a schedule from a few lines of YAML.

    Each shard is a partition that runs from member index to packed MULT and MSTR files. The jobs `<name>_pack` and
    `<name>_manifest` run in one process. For *Materialize* in the UI to do so too, the project sets
    `executor=dg.in_process_executor` in its `Definitions`: with Dagster's default, a process is started for each step,
    which takes about 3 seconds.
    """

    def __init__(self, name: str, declared: DatasetSpec | ConfigError) -> None:
        self.name = name
        self.declared = declared

    @property
    def spec(self) -> DatasetSpec:
        """The dataset.

        Raises:
            ConfigError: a key or value of its declaration is wrong; names the file, the key and what is allowed.
        """
        if isinstance(self.declared, ConfigError):
            raise self.declared
        return self.declared

    @classmethod
    def get_model_cls(cls) -> type[BaseModel]:
        """The keys of a declaration, for Dagster's schema tools."""
        return _Attributes

    @classmethod
    def load(cls, attributes: Any, context: dg.ComponentLoadContext) -> "ShardDataset":
        """Resolves the templates of a declaration and checks it; an error of it is raised where the spec is needed."""
        where = context.path / "defs.yaml" if context.path.is_dir() else context.path
        given: dict[str, Any] = {} if attributes is None else attributes.root
        name = given.get("name")
        unset = list(_unset_variables(given))
        declared: DatasetSpec | ConfigError
        try:
            for key, _, is_null in unset:
                if not is_null:
                    detail = f"is {given[key]!r} and names an environment variable that is not set"
                    raise ConfigError(where, key, detail)
            config, root = context.resolution_context.resolve_value(given), default_root()
            declared = DatasetSpec.from_config(config, where=str(where), base=where.parent, default_root=root)
            name = declared.name
            try:
                dg.ScheduleDefinition(name="cron", job_name="cron", cron_schedule=declared.cron)
            except dg.DagsterInvalidDefinitionError as error:  # the thirtieth of February
                detail = f"is {declared.cron!r}, which Dagster takes for no time"
                raise ConfigError(where, "cron", detail) from error
        except ConfigError as error:
            variables = ", ".join(sorted({variable for _, variable, _ in unset}))
            note = f"; dataset {name!r} names environment variables that are not set: {variables}" if unset else ""
            declared = ConfigError(error.where, error.key, error.detail + note)
        return cls(name if isinstance(name, str) else str(where), declared)

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """The dataset's definitions; of a wrong declaration an asset that nothing makes, with the error.

        Dagster loads all declarations of a module or none, and this one may not keep the others from loading. `dg check
        defs` fails on it all the same.
        """
        if not isinstance(self.declared, ConfigError) or os.environ.get(_VALIDATION) == "1":
            try:
                return build_definitions(self.spec)
            except Exception as error:  # of Dagster, which refuses a value; only this dataset has it
                if isinstance(error, ConfigError) or not isinstance(self.declared, DatasetSpec):
                    raise
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.declared = ConfigError(self.declared.where, "attributes", f"Dagster refuses them: {reason}")
                if os.environ.get(_VALIDATION) == "1":
                    raise self.declared from error
        if _LEFT_OUT.get():
            return dg.Definitions()
        _logger.error("dataset %r is left out: its declaration is wrong: %s", self.name, self.declared)
        place = context.component_path.get_relative_key(context.defs_module_path).replace("[", "/").rstrip("]")
        spec = dg.AssetSpec(
            key=dg.AssetKey([WRONG_DECLARATIONS, *place.split("/")]),
            group_name=WRONG_DECLARATIONS,
            description=f"The declaration of dataset `{self.name}` is wrong, so it has no assets:\n\n{self.declared}",
            metadata={"error": str(self.declared)},
            kinds={"yaml"},
        )
        return dg.Definitions(assets=[spec])


@contextmanager
def wrong_declarations_left_out() -> Iterator[None]:
    """Within it, definitions are built without a word of the datasets whose declaration is wrong."""
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def _unset_variables(attributes: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Key and environment variable of each template of one that is not set, and whether it makes its value null."""
    for key, value in attributes.items():
        for opening, attribute, argument, closing in _VARIABLE.findall(json.dumps(value, default=str)):
            if (attribute or argument) not in os.environ:
                yield key, attribute or argument, bool(attribute and opening and closing)
