"""The command `cleanba`: each of its commands is a dataclass of arguments with a `main`, in a module of its own."""

import contextlib
import importlib
import io
import sys

import tyro

from cleanba.tools.runs import bad_input

COMMANDS = {
    "eval": ("cleanba.core.evaluate", "Eval", "play episodes with a saved model"),
    "diff": ("cleanba.tools.diff", "Diff", "name the first update at which two runs differ"),
    "plot": ("cleanba.tools.plot", "Plot", "draw the learning curves of runs"),
}
HELP = "\n".join(
    [
        "usage: cleanba COMMAND ...  (cleanba COMMAND --help says more)",
        "",
        *(f"  {name}   {summary}" for name, (_, _, summary) in COMMANDS.items()),
        "",
        "To train, run an algorithm's file: python cleanba/ppo.py --help",
    ]
)


def main(argv: list[str] | None = None) -> int | None:
    """Run one command and return its exit status. Only its own module is imported, so that help comes at once."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        bad_input(f"there is no command {name!r}; use {', '.join(COMMANDS)}")
    module, command, _ = COMMANDS[name]
    cls = getattr(importlib.import_module(module), command)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(cls, prog=f"cleanba {name}", args=rest)
    except SystemExit as error:
        if error.code:
            from cleanba.core.args import _one_line

            bad_input(_one_line(said.getvalue()))
        raise
    return parsed.main()


if __name__ == "__main__":
    sys.exit(main())
