"""The `mm-assets` command.

Results go to standard output, everything else to standard error. Exit code 0: success; 1: a requested operation failed
or a file is damaged; 2: the command was used wrongly.
"""

from __future__ import annotations

import sys
from importlib import import_module

import click

from mm_assets import __version__
from mm_assets.cli.output import report_error
from mm_assets.errors import MmAssetsError

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    "plan",
    "register",
    "run",
    "status",
    "sync",
    "losses",
    "diff",
    "inspect",
    "verify",
    "convert",
    "add-stream",
    "sql",
    "clean",
    "view",
)
"""Every command; it is the object `command` of the module of its name in this package."""


class _Commands(click.Group):
    """Commands whose modules are imported when they are used, and whose errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"mm_assets.cli.{cmd_name.replace('-', '_')}").command
        # Click cuts what it derives itself to one line.
        found.short_help = " ".join((found.help or "").partition("\n\n")[0].split())
        return found

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except (MmAssetsError, OSError) as error:  # a bug keeps its traceback
            sys.exit(report_error(error, ctx.obj))
        if ctx.obj is not None and ctx.obj.wrong:
            sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mm-assets")
def main() -> None:
    """Multimodal tar shards to checked, packed training data."""
