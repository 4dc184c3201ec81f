"""`mm-assets completion`: the script with which a shell completes commands and options."""

from __future__ import annotations

import click

from mm_assets.cli.output import echo

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
    """Print the script that completes commands and options in SHELL; how to install it goes to standard error."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # these are Click's own
    click.echo(found(context.find_root().command, {}, PROGRAM, _VARIABLE).source())
    echo(f"to install it: {_INSTALL[shell]}; then start a new shell", err=True)
