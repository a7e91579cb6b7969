"""`tidegate completion`: the script that makes a shell complete `tidegate`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tidegate.cli.outcomes import answer, json_option

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
    """Print the completion script of SHELL. To have it in every session:"""
    from tidegate.cli.root import root

    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"this click knows no completion for {shell}")
    complete = kind(root, {}, "tidegate", "_TIDEGATE_COMPLETE")
    # `source()` would also run the shell to ask for its version; the person who asked knows what runs here.
    script = complete.source_template % complete.source_vars()
    answer(as_json, {"shell": shell, "script": script, "install": INSTALL[shell]}, script)
