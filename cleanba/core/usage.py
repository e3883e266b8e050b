"""Bad input: one line that says what is wrong and what would work, and exit status 2. No JAX in here."""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import tyro

T = TypeVar("T")


def usage_error(message: str) -> NoReturn:
    """Say it and leave."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def read(cls: type[T], argv: list[str], **options: Any) -> T:
    """The command line as a dataclass, by tyro, whose boxed message becomes one line."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(cls, args=argv, **options)
    except SystemExit as error:
        if error.code:
            usage_error(_one_line(said.getvalue()))
        raise


def _one_line(box: str) -> str:
    """The first and, if it suggests something, the second block of the box, which is ASCII where stdout is."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]  # the first is the title
    blocks = [" ".join(block.split()) for block in re.split("^[─-]+$", "\n".join(lines), flags=re.MULTILINE)]
    wanted = [block for block in blocks if block and not block.startswith(("Argument help", "For full"))]
    return "; ".join(wanted) or "cannot read these arguments; see --help"
