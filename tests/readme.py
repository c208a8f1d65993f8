"""Writes the tree of files into README.md: `python -m tests.readme`.

A Python file's remark is the first sentence of its docstring, so the two cannot drift apart;
`tests/test_readme.py` fails while README is behind.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: written by make readme -->\n```\n", "```\n<!-- end of the tree -->"
REMARK_AT = 27

# What has no docstring, and folders that are told in one line.
REMARKS = {
    "calib_data/reference/": "the shipped checkpoint: config.json, model.safetensors, tokenizer",
    "engines/BUNDLE.md": "The format of a bundle, in MUST lines.",
    "tuner/template/": "the page that cadenza report fills, and its style",
    "tests/": "mirrors the four rooms: tests/engines/test_sampler.py tests engines/sampler.py",
    "tests/bench/": "the figures that `make bench` prints",
    "Makefile": "demo, test, test-slow, lint, bench, clean",
    "pyproject.toml": "dependencies with their reasons; the settings of pytest, ruff and mypy",
    "constraints.txt": "the versions that the tests ran with",
    "CHANGELOG.md": "what changed for users",
}
SILENT = {"py.typed", "__init__.py", "__pycache__"}


def remark_of(path: Path) -> str:
    """Return a Python file's remark: the first line of its docstring, without the full stop.

    Raises:
        ValueError: It has none.
    """
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if not said:
        raise ValueError(f"{path.name} needs a module docstring; its first line stands in README")
    return said.splitlines()[0]


def tree() -> str:
    """Return the lines of the tree, each a path and a remark."""
    lines: list[str] = []

    def line(indent: int, name: str, remark: str) -> None:
        lines.append(f"{' ' * indent}{name}".ljust(REMARK_AT - 1) + f" {remark}")

    line(0, "cadenza.py", remark_of(ROOT / "cadenza.py"))
    for room in ("engines", "exporter", "tuner", "calib_data"):
        line(0, f"{room}/", remark_of(ROOT / room / "__init__.py"))
        for path in sorted((ROOT / room).iterdir()):
            if path.name in SILENT:
                continue
            key = path.relative_to(ROOT).as_posix() + "/" * path.is_dir()
            if path.suffix != ".py" and key not in REMARKS:
                raise ValueError(f"{key} needs a remark in REMARKS")
            remark = remark_of(path) if path.suffix == ".py" else REMARKS[key]
            line(2, path.name + "/" * path.is_dir(), remark)
    line(0, "tests/", REMARKS["tests/"])
    line(2, "bench/", REMARKS["tests/bench/"])
    for path in sorted((ROOT / "tests").glob("*.py")):
        if path.name not in SILENT:
            line(2, path.name, remark_of(path))
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "CHANGELOG.md"):
        line(0, name, REMARKS[name])
    return "\n".join(lines) + "\n"


def with_tree(text: str) -> str:
    """Return README's text with the tree as it stands on disk.

    Raises:
        ValueError: The marks that enclose it are not there.
    """
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"README.md must hold {BEGIN!r} ... {END!r}")
    return pattern.sub(lambda _: BEGIN + tree() + END, text)


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text("utf-8")), "utf-8")
    sys.exit(0)
