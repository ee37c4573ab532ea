"""What the READMEs name exists: files, functions, links, commands, settings, and every folder in the tree.

In text, `folder/file.py` is a file and `folder/file.py:Class.method` something in it; paths count from the root, from
shared/ or daemons/ (as in an import), or from the README's own folder.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from sparkle import config
from sparkle.cli import ctl

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = {".git", ".venv", "build", "node_modules", "__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache"}
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"([\w./-]+\.(?:pyi?|h|cpp|md|toml|txt|yml))(?::([\w.]+))?")
SCRIPT = re.compile(r"(?<![\w/.-])((?:scripts|\.ci)/[\w./-]*[\w/])")
MADE_LATER = re.compile(r"models/.*\.store|sparkle\.toml")


def _pages() -> Iterator[Path]:
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in NOT_OURS and not f.startswith(".venv")]
        yield from (Path(folder, f) for f in files if f.endswith(".md") and not folder.endswith(".store"))


PAGES = sorted(_pages())
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def _find(name: str, page: Path) -> Path | None:
    """Return the file or folder that a page means by `name`; a bare name may lie below the page's folder."""
    for base in (ROOT, ROOT / "shared", ROOT / "daemons", ROOT / "shared" / "sparkle", page.parent):
        if (base / name).exists():
            return base / name
    return next(page.parent.rglob(name), None) if "/" not in name else None


def _names_in(path: Path) -> set[str]:
    """Return what a source file defines, as Class.method. Of C++ all words: a wrong name is still noticed."""
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".py", ".pyi"):
        words = set(re.findall(r"\w+", text))
        return words | {f"{a}.{b}" for a in re.findall(r"(?:class|struct) (\w+)", text) for b in words}
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    add(ast.parse(text).body, "")
    return names


def test_there_are_pages() -> None:
    named = {str(p.relative_to(ROOT)) for p in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "daemons/README.md", "native/README.md", "tests/README.md"} <= named


@each_page
def test_files_and_what_is_in_them(page: Path) -> None:
    for span in SPAN.findall(page.read_text(encoding="utf-8")):
        found = FILE.fullmatch(span)
        if found is None or MADE_LATER.fullmatch(span):
            continue
        path = _find(found[1], page)
        assert path is not None, f"{page.name} names {span}: no such file"
        if found[2]:
            assert found[2] in _names_in(path), f"{page.name} names {span}: not in that file"


@each_page
def test_scripts(page: Path) -> None:
    for name in SCRIPT.findall(page.read_text(encoding="utf-8")):
        path = page.parent / name if (page.parent / name).exists() else ROOT / name
        assert path.exists(), f"{page.name} names {name}: no such script"
        if path.is_file() and not path.suffix:
            assert os.access(path, os.X_OK), f"{name} is not executable"


@each_page
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}: no such file"
        if anchor and path.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{page.name} links to {target}: no such heading"


@each_page
def test_commands(page: Path) -> None:
    for name, sub in re.findall(r"sparkle-ctl ([a-z]+)(?: ([a-z]+))?", page.read_text(encoding="utf-8")):
        if page.parent.name == "shared" and name not in ctl.command.commands:
            continue  # its help texts are generated
        command = ctl.command.get_command(click.Context(ctl.command), name)
        assert command is not None, f"{page.name}: sparkle-ctl has no command {name}"
        if sub and isinstance(command, click.Group):
            assert sub in command.commands, f"{page.name}: sparkle-ctl {name} has no command {sub}"


@each_page
def test_settings(page: Path) -> None:
    known = {f"SPARKLE_{name.upper()}" for name in config.setting_names()} | {"SPARKLE_CONFIG"}
    for name in re.findall(r"SPARKLE_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8")):
        assert name in known, f"{page.name}: there is no setting {name}"


def test_the_tree_in_the_readme_is_whole() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)`", tree, re.MULTILINE))
    folders = {f"{p.name}/" for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != "build"}
    assert {name for name in listed if name.endswith("/")} == folders
    assert all((ROOT / name).exists() for name in listed)
