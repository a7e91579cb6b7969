"""`tidegate completion`: the completion scripts for shells."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tidegate.cli.outcomes import json_option, print_result

__all__ = ["completion"]

INSTALL = {
    "bash": 'eval "$(tidegate completion bash)"        in ~/.bashrc',
    "zsh": 'eval "$(tidegate completion zsh)"         in ~/.zshrc',
    "fish": "tidegate completion fish | source         in ~/.config/fish/config.fish",
}


@click.command(epilog="\b\n" + "\n".join(INSTALL.values()))
@click.argument("shell", type=click.Choice(sorted(INSTALL)))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print the completion script for SHELL. To load it in every session:"""
    from tidegate.cli.root import root

    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"the installed click has no completion for {shell}: upgrade click")
    complete = kind(root, {}, "tidegate", "_TIDEGATE_COMPLETE")
    # Not `source()`, which would also start the shell to check its version.
    script = complete.source_template % complete.source_vars()
    print_result(as_json, {"shell": shell, "script": script, "install": INSTALL[shell]}, script)
