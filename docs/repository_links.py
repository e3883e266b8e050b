"""Links from docs/ to other files of the repository, such as ../cleanba/ppo.py, work on GitHub as they are.

For the site, mkdocs.yml names this file as a hook: what such links lead to is put below repository/ (Markdown as it is,
source code as a page that shows it, anything else as a file), and the links are changed accordingly.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
FOLDER = "repository/"
CODE = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".sh": "bash"}
LINK = re.compile(r"(?<=\]\()[^)#\s:]+(?=[)#])")


def place(page: str) -> str:
    """The path in the repository of a page of the site."""
    return page.removeprefix(FOLDER) if page.startswith(FOLDER) else f"docs/{page}"


def page(path: str) -> str:
    """The page of the site that shows a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return FOLDER + path + (".md" if Path(path).suffix in CODE else "")


def target(source: str, link: str) -> str:
    """The path in the repository that a link in a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place(source)), link))


def is_code(source: str) -> bool:
    """Whether a page only shows source code, whose brackets are no links."""
    return source.startswith(FOLDER) and Path(source.removesuffix(".md")).suffix in CODE


def content(path: str) -> str | bytes:
    """What the page of a path shows."""
    file = ROOT / path
    if file.suffix == ".md":
        return file.read_text()
    if file.suffix in CODE:
        return f"# {path}\n\n``````{CODE[file.suffix]}\n{file.read_text()}``````\n"
    return file.read_bytes()


def on_files(files: Files, *, config: Any) -> Files:
    """Add what the pages link to, and what these pages link to."""
    waiting = list(files.documentation_pages())
    while waiting:
        source = waiting.pop()
        if is_code(source.src_uri):
            continue
        for link in LINK.findall(source.content_string):
            path = target(source.src_uri, link)
            if files.get_file_from_path(page(path)) is None and (ROOT / path).is_file():
                new = File.generated(config, page(path), content=content(path))
                files.append(new)
                waiting += [new] if new.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Let the links lead there."""
    source = page.file.src_uri
    return markdown if is_code(source) else LINK.sub(lambda link: rewritten(source, link[0]), markdown)


def rewritten(source: str, link: str) -> str:
    """A link as it must stand in a page of the site."""
    path = target(source, link)
    if not (ROOT / path).is_file():
        return link
    return posixpath.relpath(page(path), posixpath.dirname(source))
