"""The kept kernels: what was written is read, whatever else is passed over."""

from __future__ import annotations

from pathlib import Path

from engines.runtime_cache import cache_file, cache_folder, read_cache, write_cache

DATA = bytes(range(256)) * 9


def kept(tmp_path: Path) -> Path:
    file = cache_file(tmp_path / "runtime", "NVIDIA L4/../x", "1.7.1.116")
    assert write_cache(file, DATA)
    return file


def test_what_was_kept_is_read_and_nothing_else_lies_there(tmp_path: Path) -> None:
    file = kept(tmp_path)
    assert file.parent == tmp_path / "runtime"
    assert read_cache(file) == DATA
    assert write_cache(file, DATA[:7])
    assert read_cache(file) == DATA[:7]
    assert list(file.parent.iterdir()) == [file]


def test_every_gpu_and_version_has_its_own(tmp_path: Path) -> None:
    names = {cache_file(tmp_path, gpu, v) for gpu in ("L4", "L40S") for v in ("1.7", "1.8")}
    assert len(names) == 4


def test_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    file = kept(tmp_path)
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole[:20], whole[:-1] + b"\0", b"x" + whole, DATA):
        file.write_bytes(damaged)
        assert read_cache(file) is None
    file.unlink()
    assert read_cache(file) is None


def test_what_others_can_write_is_passed_over(tmp_path: Path) -> None:
    file = kept(tmp_path)
    file.chmod(0o666)
    assert read_cache(file) is None
    file.chmod(0o600)
    assert read_cache(file) == DATA
    file.parent.chmod(0o777)
    assert read_cache(file) is None
    file.parent.chmod(0o700)
    real = file.rename(tmp_path / "real")
    file.symlink_to(real)
    assert read_cache(file) is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not write_cache(tmp_path / "file" / "x.cache", DATA)


def test_the_folder_is_the_user_s_and_absolute() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/cadenza/runtime")
    found = cache_folder({"XDG_CACHE_HOME": "relative"})
    assert found is None or found.is_absolute()
