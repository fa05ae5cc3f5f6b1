"""Defaults of sampling from a model's generation_config.json and from options: which, for whom, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from poolwright_engine.api.openai_api import ChatCompletionRequest, CompletionRequest
from poolwright_engine.api.sampling_options import NEUTRAL, SamplingDefaults, sampling_params
from poolwright_engine.process.config import ConfigError, EngineConfig
from poolwright_engine.process.generation_config import FILE, Found, sampling_defaults, unused

OF_MODEL = {
    "eos_token_id": 2,
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "max_new_tokens": 2048,
}


def folder(at: Path, content: Any) -> Path:
    at.mkdir(exist_ok=True)
    (at / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return at


def found(model: Path | None, **options: Any) -> Found:
    return sampling_defaults(EngineConfig(model="m", served_model_names=("m",), **options), model)


def test_a_models_own_are_the_defaults_unless_told_otherwise(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", OF_MODEL)
    of_model = found(model)
    assert of_model.defaults == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_tokens=2048)
    assert of_model.sources == (str(model / FILE),)
    assert str(of_model.defaults) == "temperature=0.6 top_p=0.95 top_k=20 max_tokens=2048"
    assert found(model, generation_config="vllm") == Found()
    assert found(None) == found(tmp_path) == found(model / "model.gguf") == Found()
    other = folder(tmp_path / "other", {"min_p": 0.1, "repetition_penalty": 1.05, "presence_penalty": 1})
    told = found(model, generation_config=str(other))
    assert told.defaults == SamplingDefaults(min_p=0.1, repetition_penalty=1.05, presence_penalty=1.0)


def test_the_option_goes_over_the_file_one_by_one(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", OF_MODEL)
    option = {"temperature": 0, "top_p": None, "top_k": -1, "stop": "x"}
    both = found(model, override_generation_config=option)
    assert both.defaults == SamplingDefaults(temperature=0.0, max_tokens=2048)
    assert both.sources == ("--override-generation-config", str(model / FILE))
    alone = found(model, override_generation_config={"frequency_penalty": 0.5}, generation_config="vllm")
    assert alone == Found(SamplingDefaults(frequency_penalty=0.5), ("--override-generation-config",))
    config = EngineConfig(model="m", served_model_names=("m",), override_generation_config=option)
    assert list(unused(config)) == ["stop"]


def test_a_length_that_a_person_sets_bounds_every_answer(tmp_path: Path) -> None:
    of_model = found(folder(tmp_path / "model", {"max_new_tokens": 100})).defaults
    of_folder = found(None, generation_config=str(tmp_path / "model")).defaults
    of_option = found(None, override_generation_config={"max_new_tokens": 100}).defaults
    assert of_folder == of_option == SamplingDefaults(max_tokens=100, most_tokens=100)
    for asked, free, bounded in ((None, 100, 100), (7, 7, 7), (500, 500, 100)):
        chat = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": asked}
        )
        assert sampling_params(chat, 10, of_model).max_tokens == free
        assert sampling_params(chat, 10, of_option).max_tokens == bounded
    for asked, free, bounded in ((None, 16, 16), (7, 7, 7), (500, 500, 100)):
        completion = CompletionRequest(prompt="x", max_tokens=asked)
        assert sampling_params(completion, 10, of_model).max_tokens == free
        assert sampling_params(completion, 10, of_option).max_tokens == bounded
    assert of_option.within(64) == SamplingDefaults(max_tokens=64, most_tokens=64)
    assert NEUTRAL.within(64) == NEUTRAL


def test_what_a_request_says_goes_over_every_default() -> None:
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.1, 0.5, 0.4, 1.1)
    silent = sampling_params(CompletionRequest(prompt="x"), 100, defaults)
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p) == (0.6, 0.9, 20, 0.1)
    assert (silent.presence_penalty, silent.frequency_penalty, silent.repetition_penalty) == (0.5, 0.4, 1.1)
    neutral: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
    said = CompletionRequest(prompt="x", **neutral)
    assert sampling_params(said, 100, defaults) == sampling_params(CompletionRequest(prompt="x"), 100)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"temperature": "0.6"}, "temperature must be a number, not '0.6'"),
        ({"temperature": -1}, "temperature must be non-negative, got -1"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ('{"temperature": NaN}', "temperature must be a number, not nan"),
        ({"top_k": 20.5}, "top_k must be an integer, not 20.5"),
        ({"top_k": 10**400}, "top_k must be an integer, not '<a very large integer>'"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\]"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0}, "repetition_penalty must be greater than zero"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ([1], "is not a JSON object"),
        ("{", "cannot be read"),
    ],
    ids=str,
)
def test_a_bad_default_is_refused_with_the_place_it_stands_in(tmp_path: Path, content: Any, said: str) -> None:
    model = folder(tmp_path / "model", content)
    for options in ({}, {"generation_config": str(model)}):
        with pytest.raises(ConfigError, match=said) as refusal:
            found(model, **options)
        assert str(refusal.value).startswith(f"--generation-config: {model / FILE}")
        assert "\n" not in str(refusal.value)
    if isinstance(content, dict):
        with pytest.raises(ConfigError, match=f"^--override-generation-config: {said}"):
            found(None, override_generation_config=content)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--generation-config: model is neither auto, vllm nor a folder that holds"):
        found(None, generation_config="model")
    with pytest.raises(ConfigError, match=r"nor a folder that holds generation_config\.json"):
        found(None, generation_config=str(tmp_path))
