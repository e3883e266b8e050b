"""The diffs that pages show, between a mark that names two files and one that ends it, written anew.

Run:  python docs/diffs.py        (`make docs` does)
"""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- diff: (\S+) (\S+) -->\n).*?(<!-- end of diff -->)", re.DOTALL)


def diff(before: str, after: str) -> str:
    """What `diff -u` says of two files, without their times."""
    old, new = ((ROOT / path).read_text().splitlines(keepends=True) for path in (before, after))
    return "".join(difflib.unified_diff(old, new, before, after))


def with_diffs(text: str) -> str:
    """A page's text, with all its diffs as they should be."""
    return BLOCK.sub(lambda m: f"{m[1]}\n```diff\n{diff(m[2], m[3])}```\n\n{m[4]}", text)


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        if text != with_diffs(text):
            page.write_text(with_diffs(text))
            print(f"wrote {page.relative_to(ROOT)}")
