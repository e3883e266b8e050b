"""Completion of the `cleanba` command in a shell, by tyro.

Run:  source <(cleanba completion bash)
"""

import contextlib
import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Completion:
    """Print what a shell must source to complete `cleanba`: its commands, their options and the values of these.

    bash: source <(cleanba completion bash)    in ~/.bashrc
    zsh: source <(cleanba completion zsh)      in ~/.zshrc, after compinit
    A script prints its own: python cleanba/ppo.py --tyro-print-completion bash
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """bash or zsh"""

    def main(self) -> None:
        """Print it; all commands are imported, so this takes some seconds and the result is worth keeping in a file."""
        from cleanba.tools.cli import COMMANDS  # here, because that module names this one

        commands = {name: getattr(importlib.import_module(module), cls) for name, (module, cls, _) in COMMANDS.items()}
        with contextlib.suppress(SystemExit):  # tyro leaves when it has printed
            tyro.extras.subcommand_cli_from_dict(commands, prog="cleanba", args=["--tyro-print-completion", self.shell])
