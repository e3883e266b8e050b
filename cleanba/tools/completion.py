"""Completion of the `cleanba` command in a shell, by tyro.

Run:  source <(cleanba completion bash)
"""

import contextlib
import importlib
import io
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

# tyro's text for zsh completes at once, as a file in zsh's fpath must; sourced, it has to name itself to zsh instead.
CALL = '_tyro_cleanba "$@"\n'
SOURCED = f"if [[ $zsh_eval_context[-1] == loadautofunc ]]; then {CALL[:-1]}; else compdef _tyro_cleanba cleanba; fi\n"


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
        text = io.StringIO()
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):  # tyro leaves when it has printed
            tyro.extras.subcommand_cli_from_dict(commands, prog="cleanba", args=["--tyro-print-completion", self.shell])
        before, call, after = text.getvalue().rpartition(CALL)
        print(before + (SOURCED if call and self.shell == "zsh" else call) + after, end="")
