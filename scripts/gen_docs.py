"""Write the generated parts of the READMEs: messages, metrics, settings, files and the help of the command lines.

    python scripts/gen_docs.py           brings the files up to date
    python scripts/gen_docs.py --check   changes nothing, fails if one is not (CI)

Owns what stands between `<!-- generated: NAME -->` and `<!-- end -->`; never touches the text around it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from sparkle import config, messages, telemetry
from sparkle.cli import chat, ctl
from sparkle.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
TARGETS = [ROOT / "shared" / "README.md"]
BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Defaults that depend on the machine are described, not computed.
DESCRIBED_DEFAULTS = {
    "run_dir": "`$XDG_RUNTIME_DIR/sparkle`, else `/tmp/sparkle-UID`",
    "state_dir": "`$XDG_STATE_HOME/sparkle`, else `~/.local/state/sparkle`",
}


def message_tables() -> str:
    """One table per receiver, in the order and with the words of the source."""
    receiver, tables = "", []
    for line in inspect.getsource(messages).splitlines():
        if heading := re.fullmatch(r"# --- (.+?) -+", line):
            receiver = heading[1]
            tables.append(f"**{receiver[0].upper()}{receiver[1:]}**\n\n| message | fields | meaning |\n|---|---|---|")
        elif (found := re.match(r"class (\w+)\(Message\)", line)) and receiver:
            tables[-1] += "\n" + message_row(messages.KINDS[found[1]])
    return "\n\n".join(tables)


def message_row(cls: type[messages.Message]) -> str:
    fields = []
    for f in dataclasses.fields(cls):
        text = f"{f.name}: {f.type}"
        if f.default is not dataclasses.MISSING:
            text += f" = {f.default!r}"
        elif f.default_factory is not dataclasses.MISSING:
            text += f" = {f.default_factory()!r}" if f.default_factory is not messages.Sampling else " = Sampling()"
        fields.append(f"`{text}`")
    return row(f"`{cls.__name__}`", ", ".join(fields) or "none", inspect.getdoc(cls) or "")


def metric_table() -> str:
    rows = (row(m.role, f"`{m.full_name}`", m.kind, m.unit, m.meaning) for m in telemetry.METRICS.values())
    return "\n".join(["| daemon | metric | kind | unit | meaning |\n|---|---|---|---|---|", *rows])


def setting_table() -> str:
    lines = ["| setting | variable | default | meaning |\n|---|---|---|---|"]
    for f in dataclasses.fields(config.Settings):
        if f.name not in config.setting_names():
            continue
        default = f.metadata["default"]
        shown = DESCRIBED_DEFAULTS[f.name] if callable(default) else f"`{default}`" if default else "none"
        lines.append(row(f"`{f.name}`", f"`SPARKLE_{f.name.upper()}`", shown, f.metadata["doc"]))
    return "\n".join(lines)


def file_list() -> str:
    """Every module with the first sentence of its docstring."""
    package = ROOT / "shared" / "sparkle"
    lines = []
    for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts), p)):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(doc.split("\n\n")[0].split())
        lines.append(f"- `{path.relative_to(package)}`: {first}")
    return "\n".join(lines)


def help_of(command: click.Command, name: str) -> str:
    """Return the help of a command and of all below it."""
    texts: list[str] = []

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(
            command, info_name=name, parent=parent, terminal_width=80, help_option_names=["-h", "--help"]
        )
        texts.append(command.get_help(context))
        if isinstance(command, click.Group):
            for sub_name in command.list_commands(context):
                sub = command.get_command(context, sub_name)
                if sub is not None:
                    add(sub, sub_name, context)

    add(command, name, None)
    return "```\n" + "\n\n\n".join(texts) + "\n```"


def row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


GENERATORS: dict[str, Callable[[], str]] = {
    "messages": message_tables,
    "metrics": metric_table,
    "settings": setting_table,
    "files": file_list,
    "sparkle": lambda: help_of(chat.command, "sparkle"),
    "sparkle-ctl": lambda: help_of(ctl.command, "sparkle-ctl"),
}


def updated(path: Path) -> tuple[str, str]:
    """Return the text of a file as it is and as it should be. Raises ConfigError for a block that nothing makes."""

    def fill(block: re.Match[str]) -> str:
        if block["name"] not in GENERATORS:
            raise ConfigError(f"{path}: nothing makes '{block['name']}'; known: {', '.join(GENERATORS)}")
        return f"{block[1]}{GENERATORS[block['name']]()}\n{block[3]}"

    text = path.read_text(encoding="utf-8")
    return text, BLOCK.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a file is not up to date")
    is_check = parser.parse_args().check
    n_stale = 0
    for path in TARGETS:
        old, new = updated(path)
        if old == new:
            continue
        n_stale += 1
        if is_check:
            print(f"{path.relative_to(ROOT)} is not up to date: run python scripts/gen_docs.py", file=sys.stderr)
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} written")
    return 1 if is_check and n_stale else 0


if __name__ == "__main__":
    sys.exit(main())
