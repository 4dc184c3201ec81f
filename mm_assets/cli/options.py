"""Options that name datasets, and their declarations and folders below a storage root."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.completion import complete_datasets, complete_partitions, complete_presets
from mm_assets.cli.output import echo, report_error
from mm_assets.cli.secrets import MASK, is_secret, masked_options, note_secrets
from mm_assets.errors import ConfigError, meant

if TYPE_CHECKING:
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.state.folder import DatasetStore
    from mm_assets.pipeline.state.staleness import DatasetState

__all__ = [
    "DatasetChoice",
    "dataset_options",
    "expect_settings_of_runs",
    "field_option",
    "parsed_options",
    "parsed_settings",
    "partition_option",
    "published_state",
    "storage_option",
]

_SUGGESTED = re.compile(r"`mm-assets (plan|init|register|run|status|stats|sync|losses|diff|add-stream|sql|clean)\b")
_TAKES_SHARDS = ("plan", "init", "register", "run", "status", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetChoice:
    """The datasets that a command was given.

    Attributes:
        names: names of datasets; none means all that are declared.
        module: definitions module that declares them; None means that of the project around the current folder.
        root: storage root, instead of the declaration's.
        shards: shards of a dataset that no YAML declares.
        pack: its pack preset.
        settings: its other settings, or those of a dataset below `root`, each as ``key=value``.
        storage_options: arguments of the file systems of shards and root that are URLs.
        wrong: errors of declarations that were left out, reported already.
    """

    names: tuple[str, ...] = ()
    module: str | None = None
    root: str | None = None
    shards: str | None = None
    pack: str | None = None
    settings: tuple[str, ...] = ()
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    wrong: list[ConfigError] = field(default_factory=list)

    def specs(self, *, read_only: bool = False, needs_home: bool = True) -> list[DatasetSpec]:
        """The declarations of the chosen datasets, or of the one that only `shards` describes.

        Where no name was given, wrong declarations are reported and left out, unless all are wrong.

        Args:
            read_only: the folder of the Dagster instance is not made where it is missing.
            needs_home: whether a dataset that only `shards` describes needs the folder of a Dagster instance.

        Raises:
            ConfigError: a dataset is not declared, its declaration is wrong, or the options contradict each other.
        """
        if self.shards is not None:
            return [self._undeclared(self.shards, needs_home=needs_home, read_only=read_only)]
        if self.pack is not None:
            raise ConfigError("arguments", "--pack", "goes with SHARDS; a declared dataset names its preset itself")
        if self.settings:
            raise ConfigError(
                "arguments",
                "--set",
                "goes with SHARDS, or with --root and --dataset of a command that needs no shards; a declared "
                "dataset has its settings in its YAML",
            )
        declared = self._declared(read_only=read_only)
        unknown = [name for name in self.names if name not in declared]
        if unknown:
            names = ", ".join(sorted(declared)) or "none"
            detail = f"{unknown[0]!r} is not declared; declared are: {names}{meant(unknown[0], declared)}"
            raise ConfigError("arguments", "--dataset", detail)
        chosen = [declared[name] for name in dict.fromkeys(self.names or declared)]
        specs = [found for found in chosen if not isinstance(found, ConfigError)]
        wrong = [found for found in chosen if isinstance(found, ConfigError)]
        raised = wrong.pop() if wrong and (self.names or not specs) else None
        for error in wrong:
            report_error(error, self)
        if raised is not None:
            raise raised
        self.wrong.extend(wrong)
        specs = specs if self.root is None else [spec.replace(root=_absolute(self.root)) for spec in specs]
        return list(map(self._with_options, specs))

    def _with_options(self, spec: DatasetSpec) -> DatasetSpec:
        """The declaration with the given options for each of its places that is a URL.

        Raises:
            ConfigError: there are such options, and both places are local.
        """
        from mm_assets.storage.urls import is_local

        if not self.storage_options:
            return spec
        places = {"storage_options": spec.shards, "root_options": spec.root}
        remote = [name for name, url in places.items() if not is_local(url)]
        if not remote:
            detail = f"are of no use: the shards and the root of {spec.name} are local"
            raise ConfigError("arguments", "--storage-options", detail)
        return spec.replace(**{name: {**getattr(spec, name), **self.storage_options} for name in remote})

    def declared(self) -> Mapping[str, DatasetSpec | ConfigError]:
        """What the definitions modules declare, by name, whatever was chosen.

        Raises:
            ConfigError: there is no project, or its modules cannot be loaded.
        """
        return self._declared(read_only=True)

    def stores(self) -> list[DatasetStore]:
        """Folders of the chosen datasets; below a given root, or the default one, also of those that nothing declares.

        Raises:
            ConfigError: a dataset is not declared, or is not below the given root.
        """
        from mm_assets.cli.project import project_folder
        from mm_assets.pipeline.dagster_home import default_root, find_dagster_home
        from mm_assets.pipeline.state.folder import DatasetStore

        if self.root and self.names:
            return self._stores_below(_absolute(self.root))
        try:
            return [DatasetStore(spec) for spec in self.specs()]
        except ConfigError as error:
            if not self.names or self.module is not None or error.key not in ("--dataset", "--module", "--set"):
                raise
            if self.settings and self._any_is_declared():
                raise
            root = _absolute(default_root(find_dagster_home(project_folder(Path.cwd()))))
            try:  # what `run --shards` has made without --root
                return self._stores_below(root)
            except ConfigError as unregistered:
                raise (error if error.key == "--dataset" or not _registered_below(root) else unregistered) from None

    def _any_is_declared(self) -> bool:
        with suppress(ConfigError):
            return not self._declared(read_only=True).keys().isdisjoint(self.names)
        return False

    def _stores_below(self, root: str) -> list[DatasetStore]:
        from mm_assets.pipeline.spec import DatasetSpec
        from mm_assets.pipeline.state.folder import DatasetStore

        # The shards of these datasets are not read, so the root stands for them.
        settings = parsed_settings(self.settings)
        configs = [{**settings, "name": name, "shards": root, "root": root} for name in self.names]
        specs = [DatasetSpec.from_config(config, where="arguments", base=Path.cwd()) for config in configs]
        stores = [DatasetStore(self._with_options(spec)) for spec in specs]
        for dataset in stores:
            if dataset.registered().source is None:
                known = _registered_below(root)
                detail = f"{dataset.store.url} is not a registered dataset{meant(dataset.spec.name, known)}"
                raise ConfigError("arguments", "--dataset", detail)
        return stores

    def complete(self, message: str) -> str:
        """A message whose suggested commands carry the given options, so that they work when pasted."""
        from mm_assets.pipeline.dagster_home import default_root

        def completed(found: re.Match[str]) -> str:
            options = {"--module": self.module, "--root": self.root}
            if found[1] in _TAKES_SHARDS:
                options |= {"--shards": self.shards, "--pack": self.pack}
            elif self.shards is not None:  # the other commands find an undeclared dataset by its root
                options |= {"--root": self.root or default_root()}
            words = [word for name, value in options.items() if value is not None for word in (name, value)]
            # A command with a masked secret could not be run: without it, the credentials come from the environment.
            shown = [setting for setting in self.settings if MASK not in _masked_setting(setting)]
            words += [word for setting in shown for word in ("--set", setting)]
            for name, value in masked_options(self.storage_options).items():
                text = value if isinstance(value, str) else json.dumps(value)
                words += ["--storage-options", f"{name}={text}"] if MASK not in text else []
            return f"{found[0]} {shlex.join(words)}" if words else found[0]

        return _SUGGESTED.sub(completed, message)

    def _declared(self, *, read_only: bool = False) -> dict[str, DatasetSpec | ConfigError]:
        from mm_assets.cli.declarations import declared_datasets
        from mm_assets.cli.project import definitions_modules, make_importable

        try:
            modules = {self.module: self.module} if self.module is not None else definitions_modules(Path.cwd())
        except ConfigError as error:
            if error.key != "--module":
                raise
            raise self._no_project(error) from None
        _find_dagster_home(read_only=read_only)  # declarations without a root are below it
        make_importable(Path.cwd())  # a module here need not be installed, as with `dagster -m`
        return {
            name: spec
            for module, location in modules.items()
            for name, spec in declared_datasets(module, location).items()
        }

    def _no_project(self, error: ConfigError) -> ConfigError:
        """The error of a command that was given neither a project nor shards, with what to give it."""
        context = click.get_current_context(silent=True)
        command = context.info_name if context is not None else None
        if command in _TAKES_SHARDS:
            words = shlex.join([word for name in self.names for word in ("--dataset", name)])
            example = " ".join(filter(None, (f"mm-assets {command}", words, "SHARDS")))
            reason = error.detail.removeprefix("is not given, and ")
            return ConfigError.of_message(f"give SHARDS, as in `{example}`: {reason}", key=error.key)
        if command == "ui":
            advice = "`mm-assets init SHARDS --dataset D --project` makes one here"
        else:
            advice = "a dataset that `mm-assets run SHARDS` has packed is named by --dataset and --root"
        return ConfigError(error.where, error.key, f"{error.detail}; {advice}")

    def _undeclared(self, shards: str, *, needs_home: bool = True, read_only: bool = False) -> DatasetSpec:
        from mm_assets.cli.project import make_importable
        from mm_assets.pipeline.dagster_home import default_root
        from mm_assets.pipeline.spec import DatasetSpec

        if len(self.names) > 1:
            raise ConfigError("arguments", "--dataset", "is given more than once; with SHARDS there is one dataset")
        if self.module is not None and self.names and self.names[0] in self._declared(read_only=read_only):
            detail = f"{self.names[0]!r} is declared with shards of its own; give SHARDS another dataset's name"
            raise ConfigError("arguments", "--dataset", detail)
        make_importable(Path.cwd())  # filters and fields of the user
        if needs_home:
            _find_dagster_home(read_only=read_only)
        root = _absolute(self.root) if self.root else default_root()
        name = self.names[0] if self.names else "default"
        settings = parsed_settings(self.settings)
        if "pack" in settings and self.pack is not None:
            raise ConfigError("arguments", "--pack", "and --set pack= are given: give one of them")
        config = {"settle_seconds": 0, "pack": self.pack, **settings, "name": name, "shards": shards}
        spec = DatasetSpec.from_config(config, where="arguments", base=Path.cwd(), default_root=root)
        note_secrets(spec.storage_options)  # the signature of a presigned URL
        return self._with_options(spec)


_OPTION_OF = {"name": "--dataset", "shards": "--shards", "root": "--root"}  # settings with an option of their own


def parsed_settings(settings: Iterable[str], *, option: str = "--set") -> dict[str, Any]:
    """The keys and values that ``key=value`` texts give; dots nest keys, and values are YAML.

    Args:
        settings: the texts.
        option: that they were given with; those of a declaration may not name what has an option of its own.

    Raises:
        ConfigError: a text has another form, a key is given twice, or a value is not YAML.
    """
    import yaml

    found: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        *outer, last = path.strip().split(".")
        if not equals or not all((*outer, last)):
            detail = f"found {_masked_setting(setting)!r}, expected KEY=VALUE such as on_damaged_shard=salvage"
            if option == "--storage-options":  # it may be a secret without its name
                detail = "found a text without =, expected KEY=VALUE such as anon=true, or a JSON object"
            raise ConfigError("arguments", option, detail)
        if option == "--set" and path.strip() in _OPTION_OF:
            raise ConfigError("arguments", "--set", f"found {path.strip()!r}: use {_OPTION_OF[path.strip()]}")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            if is_secret(path):  # what the parser says quotes the text
                raise ConfigError("arguments", path.strip(), f"found {MASK}, expected YAML") from None
            said = " ".join(str(error).split())
            raise ConfigError("arguments", path.strip(), f"found {text!r}, expected YAML: {said}") from error
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError("arguments", path.strip(), f"{name} is given as a whole by another {option}")
        if last in inner:
            raise ConfigError("arguments", path.strip(), f"is given by more than one {option}")
        inner[last] = value
    return found


def parsed_options(texts: Iterable[str]) -> dict[str, Any]:
    """The arguments of a file system, as JSON objects or ``key=value``; their secrets are masked from here on.

    Raises:
        ConfigError: a text is neither, without the text.
    """
    found: dict[str, Any] = {}
    pairs = []
    for text in texts:
        if not text.lstrip().startswith("{"):
            pairs.append(text)
            continue
        try:
            found |= json.loads(text)
        except (ValueError, RecursionError):  # which quotes what it found
            detail = 'is not JSON, expected an object such as {"anon": true}, or KEY=VALUE'
            raise ConfigError("arguments", "--storage-options", detail) from None
    found |= parsed_settings(pairs, option="--storage-options")
    note_secrets(found)
    return found


def _masked_setting(setting: str) -> str:
    """A ``key=value`` text with its value masked if that is, or may hold, a secret."""
    path, equals, _ = setting.partition("=")
    is_options = path.strip().partition(".")[0] in ("storage_options", "root_options")
    named = path.strip().rpartition(".")[2]
    return f"{path}{equals}{MASK}" if equals and is_options and (is_secret(named) or named == path.strip()) else setting


def _note_secrets_of(settings: Iterable[str]) -> None:
    """Has the secrets of the options among settings masked; wrong settings are reported when they are used."""
    for setting in settings:
        with suppress(ConfigError):
            note_secrets(parsed_settings([setting]))


def published_state(chosen: DatasetChoice, dataset: DatasetStore) -> DatasetState:
    """Returns a dataset's state; as its newest manifest lists it if the dataset is neither declared nor has `--set`."""
    from mm_assets.pipeline.state.staleness import DatasetState

    state = DatasetState(dataset)
    if not chosen.settings and not dataset.spec.is_made_from(dataset.registered().source):
        state.use_listed_recipes()
    return state


def expect_settings_of_runs(dataset: DatasetStore) -> None:
    """Raises `ConfigError` if a dataset that is not declared was published with other settings than the given ones.

    Records that were made with the given settings are taken for the current ones.
    """
    from mm_assets.pipeline.state.staleness import DatasetState

    if dataset.spec.is_made_from(dataset.registered().source):
        return
    state = DatasetState(dataset)
    made_with = {key: entry.recipe for key, entry in state.listed.items() if key in state.partitions}
    published = made_with or {key: recipes[0] for key, recipes in state.records.items() if key in state.partitions}
    if published and not any(state.recipes[key] == recipe for key, recipe in published.items()):
        name = dataset.spec.name
        detail = f"{name} was published with other settings, and it is not declared here"
        advice = "give the --set options of its last load, or run the command in the project that declares it"
        raise ConfigError("arguments", "--set", f"{detail}: {advice}")


def _find_dagster_home(*, read_only: bool) -> None:
    from mm_assets.cli.project import project_folder
    from mm_assets.pipeline.dagster_home import ensure_dagster_home, find_dagster_home

    given, here = os.environ.get("DAGSTER_HOME"), Path.cwd()
    home = (find_dagster_home if read_only else ensure_dagster_home)(project_folder(here))
    os.environ["DAGSTER_HOME"] = str(home)
    if not given and home.parent != here:
        echo(f"DAGSTER_HOME is not set: using {home}", err=True)


def _registered_below(root: str) -> list[str]:
    """The names of the datasets below a local root, for a message."""
    from mm_assets.storage.urls import is_local, local_path

    return [file.parent.name for file in sorted(local_path(root).glob("*/shards.json"))] if is_local(root) else []


def _absolute(url: str) -> str:
    from mm_assets.storage.urls import is_local, local_path

    return str(local_path(url)) if is_local(url) else url


def field_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--field`, which registers the user's own fields before the command opens a file."""

    def register(_context: click.Context, _parameter: click.Parameter, paths: tuple[str, ...]) -> None:
        if paths:
            from mm_assets.cli.project import make_importable
            from mm_assets.fields import import_field

            make_importable(Path.cwd())
            for path in paths:
                import_field(path)

    return click.option(
        "--field",
        multiple=True,
        metavar="MODULE:CLASS",
        expose_value=False,
        callback=register,
        help="Your own field that the file has; may be given again.",
    )(function)


storage_option = click.option(
    "--storage-options",
    "storage_options",
    multiple=True,
    metavar="KEY=VALUE|JSON",
    help='Arguments of the file systems of URLs, such as anon=true or \'{"key": …, "secret": …}\'; never printed.',
)


def partition_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option that names partitions, as the argument `keys`."""
    return click.option(
        "--partition", "-p", "keys", multiple=True, metavar="K", help=help_text, shell_complete=complete_partitions
    )


def dataset_options(
    *, undeclared: bool = False, single: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that name datasets, as the argument `chosen`; `undeclared` adds SHARDS that no YAML declares.

    A command for a `single` dataset refuses more than one.
    """
    options = [
        click.option(
            "--dataset",
            "-d",
            "names",
            multiple=True,
            metavar="D",
            shell_complete=complete_datasets,
            help=("Dataset name." if single else "Dataset name; may be given again.")
            + (" With SHARDS one, by default `default`." if undeclared else ""),
        ),
        click.option("--module", "-m", help="Definitions module. Default: that of the Dagster project here or above."),
        click.option("--root", metavar="URL", help="Storage root, instead of the declaration's."),
    ]
    if undeclared:
        options += [
            click.argument("place", metavar="[SHARDS]", required=False),
            click.option("--shards", metavar="GLOB", help="The same as SHARDS."),
            click.option(
                "--pack",
                metavar="PRESET",
                shell_complete=complete_presets,
                help="With SHARDS: pack preset; else the shards decide.",
            ),
        ]
    options += [
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help=("With SHARDS" if undeclared else "With --root and --dataset")
            + ": any setting of docs/settings.md; the value is YAML, and a.b=v sets b of a.",
        ),
        storage_option,
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> Any:
            _note_secrets_of(given.get("settings", ()))
            given["storage_options"] = parsed_options(given.get("storage_options", ()))
            if (place := given.pop("place", None)) is not None:
                if given["shards"] is not None:
                    raise ConfigError("arguments", "--shards", "is given beside SHARDS: give one of them")
                given["shards"] = place
            chosen = DatasetChoice(
                **{one.name: given.pop(one.name) for one in fields(DatasetChoice) if one.name in given}
            )
            click.get_current_context().find_root().obj = chosen  # for the report of an error
            return function(chosen=chosen, **given)

        return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), wrapper)

    return decorate
