"""Options that name datasets, and their declarations and folders below a storage root."""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mm_assets.cli.output import echo, report_error
from mm_assets.errors import ConfigError

if TYPE_CHECKING:
    from mm_assets.pipeline.spec import DatasetSpec
    from mm_assets.pipeline.store import DatasetStore

__all__ = ["DatasetChoice", "dataset_options", "field_option"]

_SUGGESTED = re.compile(r"`mm-assets (plan|register|run|status|sync|losses|diff|add-stream|sql|clean)\b")
_TAKES_SHARDS = ("plan", "register", "run", "status", "sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetChoice:
    """The datasets that a command was given.

    Attributes:
        names: names of datasets; none means all that are declared.
        module: definitions module that declares them; None means that of the project around the current folder.
        root: storage root, instead of the declaration's.
        shards: shards of a dataset that no YAML declares.
        pack: its pack preset.
        settings: its other settings, each as ``key=value``.
        wrong: errors of declarations that were left out, reported already.
    """

    names: tuple[str, ...] = ()
    module: str | None = None
    root: str | None = None
    shards: str | None = None
    pack: str | None = None
    settings: tuple[str, ...] = ()
    wrong: list[ConfigError] = field(default_factory=list)

    def planned(self, shards: str | None) -> list[DatasetSpec]:
        """As `specs`, of shards that are given as an argument too, without an instance's folder for those.

        Raises:
            ConfigError: as `specs`, or shards are given twice.
        """
        if shards is not None and self.shards is not None:
            raise ConfigError("arguments", "--shards", "is given beside SHARDS: give one of them")
        if shards is None and self.shards is None:
            return self.specs(read_only=True)
        return [self._undeclared(shards or self.shards or "", needs_home=False)]

    def specs(self, *, read_only: bool = False) -> list[DatasetSpec]:
        """The declarations of the chosen datasets, or of the one that only `shards` describes.

        Where no name was given, wrong declarations are reported and left out, unless all are wrong.

        Args:
            read_only: the folder of the Dagster instance is not made where it is missing.

        Raises:
            ConfigError: a dataset is not declared, its declaration is wrong, or the options contradict each other.
        """
        if self.shards is not None:
            return [self._undeclared(self.shards, read_only=read_only)]
        if self.pack is not None:
            raise ConfigError("arguments", "--pack", "goes with --shards; a declared dataset names its preset itself")
        if self.settings:
            raise ConfigError(
                "arguments", "--set", "goes with --shards; a declared dataset has its settings in its YAML"
            )
        declared = self._declared(read_only=read_only)
        unknown = [name for name in self.names if name not in declared]
        if unknown:
            detail = f"{unknown[0]!r} is not declared; declared are: {', '.join(sorted(declared)) or 'none'}"
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
        return specs if self.root is None else [spec.replace(root=_absolute(self.root)) for spec in specs]

    def stores(self) -> list[DatasetStore]:
        """Folders of the chosen datasets; below a given root, or the default one, also of those that nothing declares.

        Raises:
            ConfigError: a dataset is not declared, or is not below the given root.
        """
        from mm_assets.cli.project import project_folder
        from mm_assets.pipeline.home import default_root, find_dagster_home
        from mm_assets.pipeline.store import DatasetStore

        if self.root and self.names:
            return self._stores_below(_absolute(self.root))
        try:
            return [DatasetStore(spec) for spec in self.specs()]
        except ConfigError as error:
            if not self.names or self.module is not None or error.key not in ("--dataset", "--module"):
                raise
            root = default_root(find_dagster_home(project_folder(Path.cwd())))
            with suppress(ConfigError):  # what `run --shards` has made without --root
                return self._stores_below(_absolute(root))
            raise

    def _stores_below(self, root: str) -> list[DatasetStore]:
        from mm_assets.pipeline.spec import DatasetSpec
        from mm_assets.pipeline.store import DatasetStore

        # The shards of these datasets are not read, so the root stands for them.
        configs = [{"name": name, "shards": root, "root": root} for name in self.names]
        stores = [DatasetStore(DatasetSpec.from_config(config, where="arguments")) for config in configs]
        for dataset in stores:
            if dataset.registered().source is None:
                raise ConfigError("arguments", "--dataset", f"{dataset.store.url} is not a registered dataset")
        return stores

    def complete(self, message: str) -> str:
        """A message whose suggested commands carry the given options, so that they work when pasted."""
        from mm_assets.pipeline.home import default_root

        def completed(found: re.Match[str]) -> str:
            options = {"--module": self.module, "--root": self.root}
            if found[1] in _TAKES_SHARDS:
                options |= {"--shards": self.shards, "--pack": self.pack}
            elif self.shards is not None:  # the other commands find an undeclared dataset by its root
                options |= {"--root": self.root or default_root()}
            words = [word for name, value in options.items() if value is not None for word in (name, value)]
            if found[1] in _TAKES_SHARDS:
                words += [word for setting in self.settings for word in ("--set", setting)]
            return f"{found[0]} {shlex.join(words)}" if words else found[0]

        return _SUGGESTED.sub(completed, message)

    def _declared(self, *, read_only: bool = False) -> dict[str, DatasetSpec | ConfigError]:
        from mm_assets.cli.project import definitions_modules, make_importable
        from mm_assets.orchestration.launch import declared_datasets

        modules = (self.module,) if self.module is not None else definitions_modules(Path.cwd())
        _find_dagster_home(read_only=read_only)  # declarations without a root are below it
        make_importable(Path.cwd())  # a module here need not be installed, as with `dagster -m`
        return {name: spec for module in modules for name, spec in declared_datasets(module).items()}

    def _undeclared(self, shards: str, *, needs_home: bool = True, read_only: bool = False) -> DatasetSpec:
        from mm_assets.cli.project import make_importable
        from mm_assets.pipeline.home import default_root
        from mm_assets.pipeline.spec import DatasetSpec

        if len(self.names) > 1:
            raise ConfigError("arguments", "--dataset", "is given more than once; with --shards there is one dataset")
        if self.module is not None and self.names and self.names[0] in self._declared(read_only=read_only):
            detail = f"{self.names[0]!r} is declared with shards of its own; give --shards another dataset's name"
            raise ConfigError("arguments", "--dataset", detail)
        make_importable(Path.cwd())  # filters and fields of the user
        if needs_home:
            _find_dagster_home(read_only=read_only)
        root = _absolute(self.root) if self.root else default_root()
        name = self.names[0] if self.names else "default"
        settings = _parsed(self.settings)
        if "pack" in settings and self.pack is not None:
            raise ConfigError("arguments", "--pack", "and --set pack= are given: give one of them")
        config = {"settle_seconds": 0, "pack": self.pack, **settings, "name": name, "shards": _absolute(shards)}
        return DatasetSpec.from_config(config, where="arguments", base=Path.cwd(), default_root=root)


_OPTION_OF = {"name": "--dataset", "shards": "--shards", "root": "--root"}  # settings with an option of their own


def _parsed(settings: Iterable[str]) -> dict[str, Any]:
    """The keys and values of a declaration that ``key=value`` texts give; dots nest keys, and values are YAML.

    Raises:
        ConfigError: a text has another form, a key is given twice, or a value is not YAML.
    """
    import yaml

    found: dict[str, Any] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        *outer, last = path.strip().split(".")
        if not equals or not all((*outer, last)):
            detail = f"found {setting!r}, expected KEY=VALUE such as on_damaged_shard=salvage"
            raise ConfigError("arguments", "--set", detail)
        if path.strip() in _OPTION_OF:
            raise ConfigError("arguments", "--set", f"found {path.strip()!r}: use {_OPTION_OF[path.strip()]}")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            said = " ".join(str(error).split())
            raise ConfigError("arguments", path.strip(), f"found {text!r}, expected YAML: {said}") from error
        inner = found
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError("arguments", path.strip(), f"{name} is given as a whole by another --set")
        if last in inner:
            raise ConfigError("arguments", path.strip(), "is given by more than one --set")
        inner[last] = value
    return found


def _find_dagster_home(*, read_only: bool) -> None:
    from mm_assets.cli.project import project_folder
    from mm_assets.pipeline.home import find_dagster_home

    given, here = os.environ.get("DAGSTER_HOME"), Path.cwd()
    if read_only:
        home = find_dagster_home(project_folder(here))
    else:
        from mm_assets.orchestration.launch import ensure_dagster_home

        home = ensure_dagster_home(project_folder(here))
    os.environ["DAGSTER_HOME"] = str(home)
    if not given and home.parent != here:
        echo(f"DAGSTER_HOME is not set: using {home}", err=True)


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


def dataset_options(
    *, undeclared: bool = False, single: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Options that name datasets, as the argument `chosen`; `undeclared` adds shards that no YAML declares.

    A command for a `single` dataset refuses more than one.
    """
    options = [
        click.option(
            "--dataset",
            "-d",
            "names",
            multiple=True,
            metavar="D",
            help=("Dataset name." if single else "Dataset name; may be given again.")
            + (" With --shards one, by default `default`." if undeclared else ""),
        ),
        click.option("--module", "-m", help="Definitions module. Default: that of the Dagster project here or above."),
        click.option("--root", metavar="URL", help="Storage root, instead of the declaration's."),
    ]
    if undeclared:
        options += [
            click.option("--shards", metavar="GLOB", help="Shards of a dataset that is not declared: glob or URL."),
            click.option("--pack", metavar="PRESET", help="With --shards: pack preset; else the shards decide."),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                help="With --shards: any setting of docs/settings.md; the value is YAML, and a.b=v sets b of a.",
            ),
        ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> Any:
            chosen = DatasetChoice(
                **{one.name: given.pop(one.name) for one in fields(DatasetChoice) if one.name in given}
            )
            click.get_current_context().find_root().obj = chosen  # for the report of an error
            return function(chosen=chosen, **given)

        return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), wrapper)

    return decorate
