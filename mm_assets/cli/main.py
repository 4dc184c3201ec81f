"""The `mm-assets` command.

Results go to standard output, everything else to standard error. Exit code 0: success; 1: a requested operation failed
or a file is damaged; 2: the command was used wrongly. With `--json` standard output has one document, of an error too.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from mm_assets import __version__
from mm_assets.cli.document import document_only, is_asked_for, write_error
from mm_assets.cli.output import error_text, report_error
from mm_assets.cli.secrets import forget_secrets
from mm_assets.errors import MmAssetsError, meant

__all__ = ["COMMANDS", "leave_modules", "main"]

COMMANDS = (
    "plan",
    "init",
    "register",
    "run",
    "status",
    "stats",
    "sync",
    "losses",
    "diff",
    "inspect",
    "verify",
    "convert",
    "export",
    "card",
    "leave",
    "add-stream",
    "index",
    "sql",
    "seen",
    "clean",
    "completion",
    "view",
    "ui",
)
"""Every command; it is the object `command` of the module of its name in this package."""


_GC_THRESHOLD = 50_000  # to search the objects of modules for cycles takes a sixth of the start of a command


@atexit.register
def leave_modules() -> None:
    """Spares the end of the process the search for cycles among the modules so far, which takes as long.

    A command that uses DuckDB calls it before it imports DuckDB, which reports each of its objects that is not freed.
    """
    if "_duckdb" not in sys.modules:
        gc.freeze()


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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first argument names; an unknown one is refused with the one that is meant."""
        if args and args[0][:1].isalnum() and self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}{meant(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Runs the command line; with `--json` every end of it writes a document, also that of wrong arguments."""
        forget_secrets()
        before = gc.get_threshold()
        gc.set_threshold(_GC_THRESHOLD, *before[1:])
        try:
            return self._main(list(sys.argv[1:] if args is None else args), *rest, **options)
        except SystemExit as end:
            if (ray_tasks := sys.modules.get("mm_assets.pipeline.load.ray_tasks")) is not None:
                ray_tasks.end_process(end.code if isinstance(end.code, int) else int(end.code is not None))
            raise
        finally:
            gc.set_threshold(*before)

    def _main(self, arguments: Sequence[str], *rest: Any, **options: Any) -> Any:
        if not is_asked_for(arguments):
            return super().main(arguments, *rest, **options)
        with document_only():
            try:
                code = super().main(arguments, *rest, **{**options, "standalone_mode": False})
            except click.ClickException as error:
                error.show()
                code = error.exit_code
                write_error(type(error).__name__, error.format_message(), code)
            except click.Abort:
                code = 1
                write_error("Abort", "interrupted", code)
        sys.exit(code or 0)

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except (MmAssetsError, OSError) as error:  # a bug keeps its traceback
            code = report_error(error, ctx.obj)
            write_error(type(error).__name__, error_text(error, ctx.obj), code)
            sys.exit(code)
        if ctx.obj is not None and ctx.obj.wrong:
            sys.exit(2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="mm-assets")
def main() -> None:
    """Multimodal shards to checked, packed training data."""
