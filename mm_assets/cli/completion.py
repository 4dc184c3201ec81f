"""`mm-assets completion`: the script with which a shell completes commands, options, datasets and partitions.

Names come from files of this machine, without importing Dagster: a completion must not be waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from mm_assets.errors import ConfigError

__all__ = ["command", "complete_datasets", "complete_partitions", "complete_presets", "complete_stages"]

MAX_NAMES = 1000  # that a shell is given
PROGRAM = "mm-assets"
_VARIABLE = "_MM_ASSETS_COMPLETE"  # asks the command for completions, as Click's scripts do
_INSTALL = {
    "bash": "mm-assets completion bash > ~/.local/share/bash-completion/completions/mm-assets"
    ' (make the folder first), or add `eval "$(mm-assets completion bash)"` to ~/.bashrc',
    "zsh": 'add `eval "$(mm-assets completion zsh)"` to ~/.zshrc, after `autoload -U compinit && compinit`',
    "fish": "mm-assets completion fish > ~/.config/fish/completions/mm-assets.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(tuple(_INSTALL)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, datasets and partitions in SHELL.

    How to install it goes to standard error.
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # these are Click's own
    click.echo(found(context.find_root().command, {}, PROGRAM, _VARIABLE).source())
    click.echo(f"to install it: {_INSTALL[shell]}; then start a new shell", err=True)


def complete_datasets(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of datasets that the project's YAML files declare, or that were registered below the storage root."""
    names = {folder.name for folder in _registered(context)}
    with suppress(ConfigError, OSError):
        names.update(_declared())
    return sorted(name for name in names if name.startswith(incomplete))


def complete_partitions(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Keys of registered partitions, of the datasets that the command names or else of all, at most `MAX_NAMES`."""
    chosen = context.params.get("names") or ()
    keys: set[str] = set()
    for folder in _registered(context):
        if not chosen or folder.name in chosen:
            with suppress(OSError, ValueError, KeyError, TypeError):  # what reads it says what is wrong with it
                keys.update(json.loads((folder / "shards.json").read_bytes())["partitions"])
    return sorted(key for key in keys if key.startswith(incomplete))[:MAX_NAMES]


def complete_stages(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of the stages of a partition, in their order."""
    from mm_assets.pipeline.chain import CHAIN, MANIFEST

    return [stage.name for stage in CHAIN if stage is not MANIFEST and stage.name.startswith(incomplete)]


def complete_presets(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of pack presets."""
    from mm_assets.packing.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def _registered(context: click.Context) -> list[Path]:
    """The folders of the registered datasets below the local root that the command has."""
    from mm_assets.cli.project import project_folder
    from mm_assets.pipeline.dagster_home import default_root, find_dagster_home
    from mm_assets.storage.urls import is_local, local_path

    root = context.params.get("root") or default_root(find_dagster_home(project_folder(Path.cwd())))
    return [file.parent for file in local_path(root).glob("*/shards.json")] if is_local(root) else []


def _declared() -> Iterator[str]:
    import yaml

    from mm_assets.cli.project import declarations_folder

    for file in declarations_folder(Path.cwd()).rglob("defs.yaml"):
        with suppress(yaml.YAMLError, UnicodeDecodeError):
            for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
                attributes = document.get("attributes") if isinstance(document, dict) else None
                name = attributes.get("name") if isinstance(attributes, dict) else None
                if isinstance(name, str):
                    yield name
