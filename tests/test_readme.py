"""README says what is so: commands, options, files, links; and no file names a machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import cadenza
from tests.readme import BEGIN, END, README, ROOT, with_tree

TEXT = README.read_text("utf-8")
# What README itself promises; the tree repeats what files say of themselves.
PROSE = TEXT[: TEXT.index(BEGIN)] + TEXT[TEXT.index(END) + len(END) :]


def fenced(text: str) -> list[str]:
    """Return the lines inside code fences, continued lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def quoted(program: str) -> list[list[str]]:
    """Return the arguments of every call of a program that README shows."""
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", PROSE)
    calls = []
    for line in (*fenced(PROSE), *inline):
        words = line.removeprefix("$ ").strip()
        if words.startswith(f"{program} "):
            calls.append(shlex.split(words, comments=True)[1:])
    return calls


@cache
def help_of(command: str) -> str:
    """Return what `cadenza COMMAND --help` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "cadenza", command, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("argv", quoted("cadenza"), ids=shlex.join)
def test_a_quoted_command_and_its_options_exist(argv: list[str]) -> None:
    command, *rest = argv
    if command.startswith("-"):
        assert command in cadenza.usage()
        return
    assert command in {*cadenza.COMMANDS, "COMMAND"}
    if command == "COMMAND":
        return
    for option in (word.partition("=")[0] for word in rest if re.match(r"-{1,2}[a-z]", word)):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_of(command)), option


def test_readme_shows_every_command() -> None:
    assert {argv[0] for argv in quoted("cadenza")} >= set(cadenza.COMMANDS)


@pytest.mark.parametrize("command", cadenza.COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert f"cadenza {command}" in help_of(command)


def test_every_quoted_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    named = {word for argv in quoted("make") for word in argv if re.fullmatch(r"[a-z-]+", word)}
    assert {"demo", "test"} <= named <= targets


def test_the_tree_is_that_of_the_files() -> None:
    assert with_tree(TEXT) == TEXT, "README is behind; run `make readme`"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("engines/*.md")))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    for link in local:
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in titles}
            assert anchor in slugs, link


def files_of_the_project() -> list[Path]:
    """Return every file that git tracks or would."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


# Written apart, so that this file is not its own finding.
HOSTS = (
    "py" + "pi.",
    "python" + "hosted",
    "download." + "pytorch",
    "deb." + "debian",
    "npm" + "js.",
)
MACHINE = re.compile(r"(?<![\w.~\"'])/(?:" + "|".join(("work", "root", "tmp", "home")) + r")/\w")


def test_no_file_names_a_registry_s_host_or_a_path_of_one_machine() -> None:
    found = []
    for path in files_of_the_project():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.name}: {host}" for host in HOSTS if host in text]
        found += [f"{path.name}: {match[0]}" for match in MACHINE.finditer(text)]
    assert found == []


@pytest.mark.parametrize("line", ["see /work/" + "x", "cd /tmp/" + "y;", "`/root/" + "z`"])
def test_a_path_of_one_machine_would_be_found(line: str) -> None:
    assert MACHINE.search(line)


def test_nothing_is_left_to_be_filled_in() -> None:
    assert "<!-- lead" not in TEXT
