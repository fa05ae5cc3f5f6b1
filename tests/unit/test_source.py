"""A model comes from a path, a volume or the Hub; each way to fail is one line that says which model and why.

The Hub is a local server that speaks its endpoints; the client is Hugging Face's own.
"""

import errno
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from poolwright_engine.process import source
from poolwright_engine.process.config import ConfigError
from poolwright_engine.process.source import HubName, choose, locate, name_of, parse
from support.hub_server import COMMIT, Hub, serving_hub
from support.tiny_llama import write_tiny_llama

REPOSITORY = "org/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("hub"), shards=2)
    (folder / "README.md").write_text("for people")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "gguf").mkdir()
    for name in ("Tiny.Q4_K_M.gguf", "Tiny.Q8_0.gguf"):
        (tmp_path / "gguf" / name).write_bytes(b"GGUF " + name.encode())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text("{}")
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"x")
    with serving_hub({REPOSITORY: folder, "org/gguf": tmp_path / "gguf", "org/bin": tmp_path / "bin"}) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def refusal(model: str, hub: Hub, cache: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as refused:
        locate(model, cache=cache, endpoint=hub.url, **options)  # type: ignore[arg-type]
    text = str(refused.value)
    assert text.startswith("--model: ")
    assert "\n" not in text
    return text


# --- paths -------------------------------------------------------------------------------------------------------


def test_a_path_is_itself(folder: Path) -> None:
    assert locate(str(folder)) == folder
    (folder.parent / "tiny.gguf").write_bytes(b"GGUF")
    assert locate(str(folder.parent / "tiny.gguf")) == folder.parent / "tiny.gguf"


@pytest.mark.parametrize("model", ["/no/such/model", "./nothing", "../nothing.gguf", "~/nothing-of-that-name"])
def test_a_path_that_does_not_exist_is_no_repository(model: str) -> None:
    with pytest.raises(ConfigError, match=r"--model: model path .* does not exist"):
        parse(model)


def test_an_empty_folder_asks_whether_the_volume_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with pytest.raises(ConfigError, match="is its volume mounted"):
        locate(str(tmp_path))


def test_a_volume_may_hold_the_hubs_own_layout(tmp_path: Path) -> None:
    for commit in ("a" * 40, "b" * 40):
        (tmp_path / "snapshots" / commit).mkdir(parents=True)
    with pytest.raises(ConfigError, match="2 snapshots"):
        locate(str(tmp_path))
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("b" * 40)
    assert locate(str(tmp_path)) == tmp_path / "snapshots" / ("b" * 40)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/tiny", HubName("org/tiny")),
        ("org/Tiny-1.1B_v2:Q4_K_M", HubName("org/Tiny-1.1B_v2", quantization="Q4_K_M")),
        ("org/tiny/Tiny.Q8_0.gguf", HubName("org/tiny", file="Tiny.Q8_0.gguf")),
        ("org/tiny/sub/Tiny.gguf", HubName("org/tiny", file="sub/Tiny.gguf")),
    ],
)
def test_names_of_the_hub(model: str, expected: HubName) -> None:
    assert parse(model) == expected
    assert name_of(model) == model


@pytest.mark.parametrize("model", ["tiny", "a/b/c", "org/../tiny", "org/tiny:", "", "org tiny/x", "http://x/y"])
def test_what_is_neither_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a path of this machine nor a repository"):
        parse(model)


# --- what is fetched of a repository -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (
            ["README.md", "config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "original/a.json"],
            ["config.json", "tokenizer.json", "model.safetensors"],
        ),
        (["config.json", "model.safetensors", "consolidated.safetensors"], ["config.json", "model.safetensors"]),
        (["only.gguf", "README.md"], ["only.gguf"]),
        (["config.json", "only.gguf"], ["only.gguf"]),
        (
            ["config.json", "chat_template.jinja", "m.safetensors"],
            ["config.json", "chat_template.jinja", "m.safetensors"],
        ),
    ],
)
def test_weights_come_once_and_without_the_rest(files: list[str], chosen: list[str]) -> None:
    assert choose(HubName("o/m"), files) == chosen


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        (HubName("o/m"), ["README.md"], "no config.json and no GGUF"),
        (HubName("o/m"), ["config.json", "pytorch_model.bin"], "only pickled weights"),
        (HubName("o/m"), ["a.Q4_0.gguf", "a.Q8_0.gguf"], "choose one"),
        (HubName("o/m", quantization="Q5"), ["a.Q4_0.gguf"], "0 GGUF files of quantization Q5"),
        (HubName("o/m", file="b.gguf"), ["a.gguf"], "no file b.gguf"),
    ],
)
def test_a_repository_without_usable_weights_says_what_it_lacks(name: HubName, files: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(name, files)


# --- the Hub -----------------------------------------------------------------------------------------------------


def test_a_repository_is_fetched_once_with_progress_and_is_then_in_the_cache(
    hub: Hub, cache: Path, folder: Path
) -> None:
    seen: list[tuple[int, int]] = []
    found = locate(REPOSITORY, cache=cache, endpoint=hub.url, progress=lambda done, total: seen.append((done, total)))
    files = {file.name for file in folder.iterdir()} - {"README.md"}
    assert {file.name for file in found.iterdir()} == files
    assert all((found / name).read_bytes() == (folder / name).read_bytes() for name in files)
    total = sum((folder / name).stat().st_size for name in files if name != "config.json")
    assert seen[-1] == (total, total)
    assert all(0 <= done <= total for done, _ in seen)
    before = len(hub.fetched("model-00001-of-00002.safetensors"))
    assert locate(REPOSITORY, cache=cache, endpoint=hub.url) == found
    assert len(hub.fetched("model-00001-of-00002.safetensors")) == before == 1


def test_a_cut_connection_goes_on_where_it_was_cut(
    hub: Hub, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what is not a whole one of these is asked for again
    name = "model-00002-of-00002.safetensors"
    hub.break_after[name] = [10_000]
    found = locate(REPOSITORY, cache=cache, endpoint=hub.url)
    assert (found / name).read_bytes() == (folder / name).read_bytes()
    assert hub.fetched(name) == [None, "bytes=10000-"]


def test_an_interrupted_download_keeps_the_files_that_were_whole(
    hub: Hub, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    hub.break_after[second] = [0] * 6  # as often as the client tries
    assert "could not be fetched" in refusal(REPOSITORY, hub, cache)
    found = locate(REPOSITORY, cache=cache, endpoint=hub.url)
    assert (found / second).read_bytes() == (folder / second).read_bytes()
    assert len(hub.fetched(first)) == 1
    assert not list(cache.rglob("*.incomplete"))


def test_one_file_of_a_repository(hub: Hub, cache: Path) -> None:
    found = locate("org/gguf:q8_0", cache=cache, endpoint=hub.url)
    assert found.read_bytes() == b"GGUF Tiny.Q8_0.gguf"
    assert not hub.fetched("Tiny.Q4_K_M.gguf")
    assert locate("org/gguf/Tiny.Q8_0.gguf", cache=cache, endpoint=hub.url) == found
    assert "choose one as org/gguf/FILE (Tiny.Q4_K_M.gguf, Tiny.Q8_0.gguf)" in refusal("org/gguf", hub, cache)


def test_each_refusal_of_the_hub_is_told_apart(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "the Hub has no repository org/none" in refusal("org/none", hub, cache)
    assert "has no revision v9" in refusal(REPOSITORY, hub, cache, revision="v9")
    assert "only pickled weights" in refusal("org/bin", hub, cache)
    hub.gated = {REPOSITORY: "secret"}
    assert "org/tiny is gated" in refusal(REPOSITORY, hub, cache)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert locate(REPOSITORY, cache=cache, endpoint=hub.url).is_dir()


def test_a_hub_that_fails_is_told_and_what_the_cache_has_is_used(
    hub: Hub, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.status = 503
    assert f"the Hub ({hub.url}) answered 503 for {REPOSITORY}" in refusal(REPOSITORY, hub, cache)
    hub.status = None
    found = locate(REPOSITORY, cache=cache, endpoint=hub.url)
    hub.status = 503
    with caplog.at_level(logging.WARNING):
        assert locate(REPOSITORY, cache=cache, endpoint=hub.url) == found
    assert "Used the copy in the cache" in caplog.text


def test_without_a_network_only_a_complete_copy_is_used(hub: Hub, cache: Path) -> None:
    nobody = "http://127.0.0.1:9"  # the discard port: nobody listens
    with pytest.raises(ConfigError, match=f"could not be fetched from the Hub .{nobody}"):
        locate(REPOSITORY, cache=cache, endpoint=nobody)
    found = locate(REPOSITORY, cache=cache, endpoint=hub.url)
    assert locate(REPOSITORY, cache=cache, endpoint=nobody) == found
    (found / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        locate(REPOSITORY, cache=cache, endpoint=nobody)


def test_offline_mode_is_named(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = locate(REPOSITORY, cache=cache, endpoint=hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(REPOSITORY, cache=cache, endpoint=hub.url) == found
    said = refusal("org/gguf:Q8_0", hub, cache)
    assert "HF_HUB_OFFLINE" in said
    assert "is not in the cache" in said


def test_too_little_space_is_known_before_the_download(hub: Hub, cache: Path) -> None:
    hub.listed_sizes["model-00001-of-00002.safetensors"] = 10**18
    said = refusal(REPOSITORY, hub, cache)
    assert "needs 1000000.0 TB in" in said
    assert not hub.fetched("model-00001-of-00002.safetensors")


def test_a_disk_that_fills_up_on_the_way_is_named(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    assert f"no space left in {cache}" in refusal(REPOSITORY, hub, cache)


def test_a_model_that_cannot_be_served_is_refused_before_its_weights_come(hub: Hub, cache: Path) -> None:
    def no(config: Path) -> None:
        raise ConfigError(f"--model: {json.loads(config.read_text())['architectures'][0]} is not supported")

    with pytest.raises(ConfigError, match="LlamaForCausalLM is not supported"):
        locate(REPOSITORY, cache=cache, endpoint=hub.url, can_serve=no)
    assert not [file for _, file, _ in hub.requests if "safetensors" in file]


def test_another_place_for_downloads_is_where_they_go(hub: Hub, tmp_path: Path) -> None:
    found = locate(REPOSITORY, cache=tmp_path / "elsewhere", endpoint=hub.url)
    assert found == tmp_path / "elsewhere" / "models--org--tiny" / "snapshots" / COMMIT
    shutil.rmtree(found.parent)


def test_progress_is_logged_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    report = source.logged_progress(every_seconds=3600)
    with caplog.at_level(logging.INFO):
        report(1, 2_500_000_000)
        report(2_500_000_000, 2_500_000_000)
    assert [record.getMessage() for record in caplog.records] == ["Fetched the model done=2.5 GB total=2.5 GB"]
