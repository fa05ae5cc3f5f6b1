"""`LLM`: answers as the server gives them, for a program without an event loop, and with vLLM's names."""

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poolwright_engine import LLM, SamplingParams
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.model.batch_invariant import BatchInvariantModel
from poolwright_engine.offline.llm import RequestOutput
from poolwright_engine.process.config import ConfigError
from poolwright_engine.scheduling.scheduler_config import TokenBudget
from support.tiny_llama import write_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "kv_cache_mebibytes": 8,
    "cpu_threads": 1,
    "max_num_seqs": 4,
    "cpu_linear_form": "rows",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(model: Path, one_torch_thread: None) -> Iterator[LLM]:
    with LLM(str(model), kv_cache_mebibytes=8, cpu_threads=1, max_num_seqs=8) as llm:
        yield llm


def ids(answers: list[RequestOutput]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


def test_each_prompt_has_its_answer_in_its_place(llm: LLM) -> None:
    prompts = [f"prompt number {number}" for number in range(40)]  # more than are open at once
    together = llm.generate(prompts, GREEDY)
    assert [answer.prompt for answer in together] == prompts
    assert ids(together[:3]) == [ids(llm.generate(prompt, GREEDY))[0] for prompt in prompts[:3]]
    one = together[0]
    assert one.prompt_token_ids == llm.get_tokenizer().encode(prompts[0])
    assert one.finished
    assert (len(one.outputs[0].token_ids), one.outputs[0].finish_reason) == (8, "length")
    assert one.outputs[0].logprobs is one.outputs[0].cumulative_logprob is one.prompt_logprobs is None


def test_prompts_may_be_token_ids_and_each_may_have_its_own_params(llm: LLM) -> None:
    token_ids = llm.get_tokenizer().encode("hello")
    assert ids(llm.generate(token_ids, GREEDY)) == ids(llm.generate("hello", GREEDY))
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    assert [len(each) for each in ids(llm.generate(["a", token_ids], [GREEDY, short]))] == [8, 2]
    assert llm.generate([], GREEDY) == []


def test_several_choices_and_their_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (answer,) = llm.generate(["abc"], params)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 3
    for output in answer.outputs:
        assert output.logprobs is not None
        assert output.cumulative_logprob == pytest.approx(
            sum(entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True))
        )
        assert all(2 <= len(entry) <= 3 for entry in output.logprobs)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in answer.prompt_logprobs[1:] if entry] == answer.prompt_token_ids[1:]
    assert llm.generate(["abc"], params) == [answer] or answer.num_cached_tokens != 16  # the same draw again


def test_an_answer_may_go_on_to_the_end_of_the_context(llm: LLM) -> None:
    (answer,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=None, min_tokens=20, ignore_eos=True))
    assert len(answer.prompt_token_ids) + len(answer.outputs[0].token_ids) == 512
    with pytest.raises(ValueError, match="min_tokens must be less than or equal to max_tokens=16"):
        SamplingParams(min_tokens=20)


def test_stops_and_structure_are_those_of_the_server(llm: LLM) -> None:
    (free,) = llm.generate("abc", GREEDY)
    token = free.outputs[0].token_ids[3]
    (stopped,) = llm.generate("abc", SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=[token]))
    assert stopped.outputs[0].stop_reason == token
    choice = SamplingParams(temperature=0, max_tokens=16, structured_outputs={"choice": ["yes", "no"]})
    assert llm.generate("abc", choice)[0].outputs[0].text in ("yes", "no")


def test_a_conversation_becomes_its_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, GREEDY)
    assert answer.prompt == "user: hi\nassistant: "
    assert ids([answer]) == ids(llm.generate(answer.prompt, GREEDY))
    assert len(llm.chat([messages, messages], GREEDY)) == 2
    (bare,) = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert bare.prompt == "user: hi\n"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"temperature": -1}, "temperature must be non-negative"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"n": 0}, "n must be at least 1"),
        ({"stop": ""}, "stop cannot contain an empty string"),
        ({"stop": ["a"] * 5}, "stop may hold at most 4 strings"),
        ({"max_tokens": "many"}, "max_tokens: "),
        ({"top_p": 0}, "top_p must be in"),
        ({"logprobs": 21}, "greater than max allowed"),
        ({"structured_outputs": {"json": "{"}}, "not valid JSON"),
    ],
)
def test_what_no_model_can_be_asked_is_a_value_error_at_once(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (SamplingParams(max_tokens=600), "max_tokens=600 cannot be greater"),
        (SamplingParams(stop_token_ids=[100_000]), "out-of-vocab"),
    ],
)
def test_what_this_model_cannot_be_asked_is_a_value_error_before_anything_runs(
    llm: LLM, params: SamplingParams, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        llm.generate(["a", "b"], params)


def test_a_prompt_that_does_not_fit_is_a_value_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match="maximum context length is 512 tokens"):
        llm.generate(["a", "x" * 600], GREEDY)
    with pytest.raises(ValueError, match="2 prompts came with 1 sampling params"):
        llm.generate(["a", "b"], [GREEDY])


def test_an_engine_that_cannot_be_made_is_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean --max-model-len"):
        LLM(str(model), max_model_length=7)
    with pytest.raises(ConfigError, match="is its volume mounted"):
        LLM(str(tmp_path))
    with pytest.raises(ConfigError, match="--max-model-len: 1024 is more than the 512 tokens of the model"):
        LLM(str(model), max_model_len=1024)
    assert issubclass(ConfigError, ValueError)


def test_a_caller_may_have_an_event_loop_of_its_own(llm: LLM) -> None:
    async def caller() -> list[list[int]]:
        return ids(llm.generate("hello", GREEDY))

    assert asyncio.run(caller()) == ids(llm.generate("hello", GREEDY))


def test_threads_may_share_it(llm: LLM) -> None:
    found: dict[int, list[list[int]]] = {}

    def ask(number: int) -> None:
        found[number] = ids(llm.generate(f"thread {number}", GREEDY, progress=False))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: ids(llm.generate(f"thread {number}", GREEDY)) for number in range(4)}


def test_after_its_end_it_says_so(model: Path, one_torch_thread: None) -> None:
    llm = LLM(str(model), kv_cache_mebibytes=8, cpu_threads=1)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate("abc", GREEDY)


_INTERRUPTED = """
    import sys, threading
    from poolwright_engine import LLM, SamplingParams

    llm = LLM(sys.argv[1], kv_cache_mebibytes=8, cpu_threads=1, cpu_duty_percent=5)
    print("begun", flush=True)
    try:
        llm.generate(["abc"] * 4, SamplingParams(max_tokens=400, ignore_eos=True))
    except KeyboardInterrupt:
        print("interrupted", llm._running.engine.stats().running, flush=True)
    short = llm.generate("abc", SamplingParams(max_tokens=2, ignore_eos=True))
    print(len(short[0].outputs[0].token_ids), flush=True)
    llm.close()
    print([thread.name for thread in threading.enumerate() if thread is not threading.main_thread()], flush=True)
"""


def test_an_interrupt_ends_the_call_and_leaves_the_engine_usable(model: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_INTERRUPTED), str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
        assert process.wait(60) == 0
    assert rest[0].startswith("interrupted")
    assert rest[1:] == ["2", "[]"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"max_num_batched_tokens": "auto", "tbt_target_ms": 50},
            {"token_budget": TokenBudget.AUTO, "tbt_target_seconds": 0.05},
        ),
        (
            {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_scheduled_tokens": 16},
            {"chunked_prefill": True, "max_num_batched_tokens": 64, "step_tokens": 16},
        ),
        ({"batching": "static", "static_window_ms": 1}, {"batching": "static", "static_window_seconds": 0.001}),
        (
            {"batching": "vllm", "scheduling_policy": "priority", "max_num_batched_tokens": 64},
            {"batching": "vllm", "scheduling_policy": "priority", "chunked_prefill": True},
        ),
        ({"preemption_mode": "swap", "swap_space": 0.001, "kv_cache_mebibytes": 1}, {"preemption": "swap"}),
        (
            {"enable_prefix_caching": False, "num_speculative_tokens": 3},
            {"enable_prefix_caching": False, "speculative_ngram_tokens": 3},
        ),
    ],
    ids=lambda options: " ".join(options),
)
def test_options_reach_the_engine_and_change_no_token(
    llm: LLM, model: Path, options: dict[str, Any], told: dict[str, Any]
) -> None:
    prompts = ["one prompt", "another, which is a good deal longer than sixteen tokens", "one prompt"]
    with LLM(str(model), **SETTINGS | options) as other:
        assert {name: getattr(other._running.engine._config, name) for name in told} == told
        assert {name: getattr(llm._running.engine._config, name) for name in told} != told
        assert ids(other.generate(prompts, GREEDY)) == ids(llm.generate(prompts, GREEDY))


def test_a_batch_invariant_model_changes_no_token(llm: LLM, model: Path) -> None:
    with LLM(str(model), **SETTINGS, batch_invariant=True) as other:
        runner = other._running.parts.runner
        assert isinstance(runner, CpuRunner)
        assert isinstance(runner._model, BatchInvariantModel)
        assert ids(other.generate("one prompt", GREEDY)) == ids(llm.generate("one prompt", GREEDY))


def test_without_params_the_model_says_how_to_sample(
    tmp_path: Path, one_torch_thread: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_llama(tmp_path / "said")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 5, "max_new_tokens": 900}))
    own = SamplingParams(temperature=0.7, top_k=5, max_tokens=512, seed=1, ignore_eos=True)
    with LLM(str(model), **SETTINGS, override_generation_config={"top_k": 1}) as llm:
        assert llm.get_default_sampling_params() == replace(own, top_k=1, seed=None, ignore_eos=False)
        assert "Took defaults of sampling temperature=0.7 top_k=1" in caplog.text
        assert len({tuple(ids(llm.generate("abc"))[0]) for _ in range(2)}) == 1  # of the one most likely
        varied = SamplingParams(max_tokens=8, ignore_eos=True)
        assert len({tuple(ids(llm.generate("abc", varied))[0]) for _ in range(3)}) > 1  # what is given stands alone
    with LLM(str(model), **SETTINGS, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="--override-generation-config: expected a JSON object"):
        LLM(str(model), override_generation_config="top_k")


def test_no_token_beside_the_allowed_ones_is_sampled(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, allowed_token_ids=[65, 70, 70, 72], seed=1, ignore_eos=True)
    assert set(ids(llm.generate("abc", params))[0]) == {65, 70, 72}


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
def test_other_precisions_answer(model: Path, options: dict[str, Any]) -> None:
    with LLM(str(model), kv_cache_mebibytes=8, cpu_threads=1, max_num_seqs=4, cpu_linear_form="rows", **options) as llm:
        assert len(ids(llm.generate("abc", GREEDY))[0]) == 8


def test_another_chat_template_is_given_as_text_or_as_a_file(model: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}!"
    (tmp_path / "t.jinja").write_text(template)
    settings: dict[str, Any] = {"kv_cache_mebibytes": 8, "cpu_threads": 1, "cpu_linear_form": "rows"}
    for given in (template, str(tmp_path / "t.jinja")):
        with LLM(str(model), chat_template=given, **settings) as llm:
            assert llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].prompt == "hi!"
    with pytest.raises(ConfigError, match=r"--chat-template: none.jinja cannot be read"):
        LLM(str(model), chat_template="none.jinja", **settings)
    with pytest.raises(ConfigError, match="--chat-template: the chat template is not valid"):
        LLM(str(model), chat_template="{{ broken", **settings)


def test_unseeded_requests_follow_the_engines_seed(model: Path) -> None:
    random = SamplingParams(max_tokens=8, ignore_eos=True)
    settings: dict[str, Any] = {"kv_cache_mebibytes": 8, "cpu_threads": 1, "cpu_linear_form": "rows"}

    def draw(seed: int) -> list[list[int]]:
        with LLM(str(model), seed=seed, **settings) as llm:
            return ids(llm.generate(["a", "b"], random))

    assert draw(3) == draw(3) != draw(4)
