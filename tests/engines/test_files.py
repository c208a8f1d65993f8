"""Laws of files that ship: nothing leaves the folder, nothing is half written."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from engines.errors import InputError
from engines.files import (
    LINK_FROM_BYTES,
    FileEntry,
    check_files,
    digest_file,
    place_file,
    regular_file,
    relative_path,
    whole_folder,
)

ROOT = Path(__file__).resolve().parents[2]

LEAVING = [
    "", "/etc/passwd", "../x", "a/../../x", "a/..", ".", "./a", "a//b", "a/", "a\\b", "..\\x",
    "C:\\x", "C:/x", "c:x", "a\0b", "a\nb", "a\x1bb", "a\u202eb", "a ", "a.", "b /c", "\\\\h\\x",
    "x" * 256, "é" * 128, "/".join(["abcdefghi"] * 101), "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("path", LEAVING, ids=ascii)
def test_a_path_that_could_leave_is_refused_by_its_spelling(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match="nothing outside the folder is ever read"):
        relative_path(path)
    with pytest.raises(InputError):
        regular_file(tmp_path, path)


@pytest.mark.parametrize("path", ["a", "weights/m.data", "模型 é $HOME/x", "..a/b..c", "%2e%2e/x"])
def test_a_harmless_path_is_taken(tmp_path: Path, path: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(b"x")
    assert regular_file(tmp_path, path).read_bytes() == b"x"


def test_links_folders_and_pipes_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real/file")
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    for path in ("link", "folder/file", "dangling", "pipe", "real", "missing", "real/file/x"):
        with pytest.raises(InputError):
            check_files(tmp_path, {path: FileEntry(sha256(b"x").hexdigest(), 1)})
    for path in ("pipe", "link", "missing"):
        with pytest.raises(InputError):
            digest_file(tmp_path / path)


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    check_files(tmp_path / "link", {"file": FileEntry(sha256(b"x").hexdigest(), 1)})


def test_a_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    assert digest_file(tmp_path / "file") == FileEntry(sha256(data).hexdigest(), len(data))


def test_a_changed_byte_or_size_is_found(tmp_path: Path) -> None:
    entry = FileEntry(sha256(b"abc").hexdigest(), 3)
    (tmp_path / "file").write_bytes(b"abc")
    check_files(tmp_path, {"file": entry})
    (tmp_path / "file").write_bytes(b"abd")
    with pytest.raises(InputError, match="its content has changed"):
        check_files(tmp_path, {"file": entry})
    check_files(tmp_path, {"file": entry}, digests=False)
    (tmp_path / "file").write_bytes(b"ab")
    with pytest.raises(InputError, match="has 2 bytes, listed are 3"):
        check_files(tmp_path, {"file": entry}, digests=False)


def test_sizes_are_checked_before_any_byte_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"changed")
    (tmp_path / "b").write_bytes(b"short")
    wrong = {"a": FileEntry("0" * 64, 7), "b": FileEntry("0" * 64, 99)}
    with pytest.raises(InputError, match="'b' has 5 bytes"):
        check_files(tmp_path, wrong)


def test_large_files_are_linked_and_small_ones_copied(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(LINK_FROM_BYTES))
    small.write_bytes(b"x")
    (tmp_path / "pointer").symlink_to("large")
    assert place_file(tmp_path / "pointer", tmp_path / "out/linked")
    assert not place_file(small, tmp_path / "out/copied")
    assert not place_file(large, tmp_path / "out/forced", copy=True)
    assert (tmp_path / "out/linked").samefile(large)
    assert not (tmp_path / "out/copied").samefile(small)
    assert not (tmp_path / "out/linked").is_symlink()


def ours(folder: Path) -> bool:
    return (folder / "ours").exists()


def write(out: Path, name: str, force: bool = False) -> None:
    with whole_folder(out, force=force, is_ours=ours, kind="thing") as folder:
        (folder / "ours").touch()
        (folder / name).touch()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["out", "模型 é $HOME", "-x", "a b'\"", "new\nline", "n" * 250])
def test_a_folder_appears_whole_under_any_name(tmp_path: Path, name: str) -> None:
    write(tmp_path / "deep" / name, "file")
    assert names(tmp_path / "deep") == {name}
    assert names(tmp_path / "deep" / name) == {"ours", "file"}


def test_a_failure_leaves_nothing_or_what_was_there(tmp_path: Path) -> None:
    for there in (False, True):
        if there:
            write(tmp_path / "out", "old")
        before = names(tmp_path)
        with (
            pytest.raises(KeyboardInterrupt),
            whole_folder(tmp_path / "out", force=True, is_ours=ours, kind="thing") as folder,
        ):
            (folder / "half").touch()
            raise KeyboardInterrupt
        assert names(tmp_path) == before
    assert names(tmp_path / "out") == {"ours", "old"}


def test_force_replaces_and_leaves_no_orphan(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new", force=True)
    assert names(tmp_path / "out") == {"ours", "new"}
    assert names(tmp_path) == {"out"}


def test_what_is_there_is_kept_without_force_and_what_is_foreign_always(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with pytest.raises(InputError, match="give --force to replace it"):
        write(tmp_path / "out", "new")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letters").touch()
    with pytest.raises(InputError, match="holds other files and is no thing"):
        write(tmp_path / "home", "new", force=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a folder"):
        write(tmp_path / "file", "new", force=True)
    assert names(tmp_path / "home") == {"letters"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "new")
    assert names(tmp_path / "out") == {"ours", "new"}


def killed_at(out: Path, stage: str) -> None:
    """Leave what a process leaves that is killed while it replaces `out`."""
    with whole_folder(out, force=True, is_ours=ours, kind="thing") as partial:
        (partial / "ours").touch()
    replaced = partial.with_suffix(".replaced")
    if stage == "writing":
        partial.mkdir()
        (partial / "half").touch()
    elif stage == "between the renames":
        out.rename(replaced)
        partial.mkdir()
    else:
        replaced.mkdir()
        (replaced / "ours").touch()


@pytest.mark.parametrize("stage", ["writing", "between the renames", "after the renames"])
def test_the_next_run_cleans_up_after_a_killed_one(tmp_path: Path, stage: str) -> None:
    write(tmp_path / "out", "old")
    killed_at(tmp_path / "out", stage)
    write(tmp_path / "out", "new", force=True)
    assert names(tmp_path / "out") == {"ours", "new"}
    assert names(tmp_path) == {"out"}


def test_a_run_between_the_renames_is_undone_before_anything_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    killed_at(tmp_path / "out", "between the renames")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="--force"):
        write(tmp_path / "out", "new")
    assert names(tmp_path) == {"out"}


WRITER = """
import sys
from pathlib import Path
from engines.files import whole_folder

out = Path(sys.argv[1])
for number in range(10**9):
    with whole_folder(out, force=True, is_ours=lambda _: True, kind="thing") as folder:
        for name in ("a", "b", "c"):
            (folder / name).write_text(str(number))
    print(number, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_folder_or_one_that_comes_back(
    tmp_path: Path,
) -> None:
    rng, out = random.Random(7), tmp_path / "out"
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(out)], stdout=subprocess.PIPE, cwd=ROOT
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(rng.random() * 0.05)
            writer.kill()
        if not out.exists():  # between the two renames: the old one waits beside
            (waiting,) = tmp_path.glob(".cadenza-*.replaced")
            assert names(waiting) == {"a", "b", "c"}
        else:
            assert len({(out / name).read_text() for name in "abc"}) == 1
