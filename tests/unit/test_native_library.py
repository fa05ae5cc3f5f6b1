"""The C library: made once, kept where only its owner writes, and never a reason not to start."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from poolwright_engine.native import library as native
from poolwright_engine.native.library import CpuOperations, NoLibrary

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler on this machine")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a process that has looked for nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_HERE", _copy_of_sources(tmp_path / "sources"))
    native._library.cache_clear()
    native._warn_once.cache_clear()
    yield tmp_path / "poolwright" / "native"
    native._library.cache_clear()
    native._warn_once.cache_clear()


def _copy_of_sources(folder: Path) -> Path:
    folder.mkdir()
    for source in Path(native.__file__).parent.glob("*.[ch]"):
        shutil.copy(source, folder)
    return folder


@needs_compiler
def test_it_is_compiled_once_and_only_its_owner_may_write_where_it_lies(cache: Path) -> None:
    native.library()
    (path,) = cache.glob("*.so")
    assert path.name == native.file_name(native.level())
    assert cache.stat().st_mode & 0o077 == 0
    made = path.stat().st_mtime_ns
    native._library.cache_clear()
    assert isinstance(native.library(), ctypes.CDLL)
    assert path.stat().st_mtime_ns == made


@needs_compiler
def test_other_sources_are_another_library(cache: Path) -> None:
    before = native.file_name("plain")
    with (native._HERE / "element.h").open("a") as file:
        file.write("/* changed */\n")
    assert native.file_name("plain") != before


@needs_compiler
def test_every_kind_of_cpu_compiles(cache: Path) -> None:
    for kind in native.LEVELS if os.uname().machine == "x86_64" else ("plain",):
        cache.mkdir(parents=True, exist_ok=True)
        assert native.compile_into(cache, kind).exists()


@needs_compiler
def test_what_others_may_have_written_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    native.library()
    (path,) = cache.glob("*.so")
    path.chmod(0o777)
    native._library.cache_clear()
    native.library()
    assert "others may write" in caplog.text
    assert path.stat().st_mode & 0o022 == 0, "it was not made anew"


@needs_compiler
def test_a_group_that_may_write_by_default_changes_nothing(cache: Path) -> None:
    before = os.umask(0o002)
    try:
        native.library()
        (path,) = cache.glob("*.so")
        made = path.stat().st_mtime_ns
        native._library.cache_clear()
        native.library()
        assert path.stat().st_mtime_ns == made
    finally:
        os.umask(before)


def test_a_folder_that_others_may_write_keeps_no_library(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(NoLibrary, match="others may write where it is kept"):
        native.library()


def test_a_process_without_a_home_computes_by_pytorch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(native, "cache_dir", no_home)
    assert not native.is_native(CpuOperations.AUTO)
    with pytest.raises(NoLibrary, match="nowhere to keep it: Could not determine home"):
        native.library()


@needs_compiler
def test_half_a_file_is_replaced_at_the_next_start(cache: Path) -> None:
    cache.mkdir(mode=0o700, parents=True)
    (cache / native.file_name(native.level())).touch(mode=0o755)
    with pytest.raises(NoLibrary):
        native.library()
    native._library.cache_clear()
    assert isinstance(native.library(), ctypes.CDLL)


def test_without_a_compiler_pytorch_computes_and_says_so_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CC", raising=False)
    assert not native.is_native(CpuOperations.AUTO)
    assert not native.is_native(CpuOperations.AUTO)
    assert [record.message for record in caplog.records if "no C compiler" in record.message] == [
        "Found no library of C operations, steps take longer reason=no C compiler (gcc, cc)"
    ]
    with pytest.raises(NoLibrary, match="no C compiler"):
        native.is_native(CpuOperations.NATIVE)


@needs_compiler
def test_a_compiler_that_fails_is_quoted(cache: Path) -> None:
    (native._HERE / "broken.c").write_text("int this_is_no_c(\n")
    with pytest.raises(NoLibrary, match=r"ended with 1: .*broken\.c:.* error"):
        native.library()
    assert not list(cache.glob("*.so")), "nothing half made is left"


@needs_compiler
def test_images_get_a_library_for_each_kind_of_cpu_without_pytorch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch in a build stage')\n")
    stale = tmp_path / "made" / "x86_64-avx2-0000000000000000.so"
    stale.parent.mkdir()
    stale.touch()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, "-m", "poolwright_engine.native.library", str(tmp_path / "made")], check=True, env=environment
    )
    names = {path.name for path in (tmp_path / "made").iterdir()}
    kinds = native.LEVELS if os.uname().machine == "x86_64" else ("plain",)
    assert names == {native.file_name(kind) for kind in kinds}
