"""`poolwright-engine`: vLLM's flags with its meanings, what a wrong one is answered, help, completion."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

from poolwright_engine.cli import main as main_module
from poolwright_engine.cli import shell_completion
from poolwright_engine.cli.main import PROGRAM, _parsed, commands, main, make_parser
from poolwright_engine.process import preflight
from poolwright_engine.process.config import ConfigError, EngineConfig, Usage
from poolwright_engine.process.options import (
    WITHOUT_EFFECT,
    config_of,
    count,
    flags_without_effect,
    from_keywords,
    warnings_of,
)
from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode, SchedulingPolicy, TokenBudget

COMMANDS = list(commands(make_parser()))


def serve(*words: str) -> EngineConfig:
    return config_of(_parsed(["serve", *words]))


def test_flags_of_vllm_mean_what_they_mean_there() -> None:
    made = serve(
        *("org/model", "--max-num-batched-tokens", "4K", "--max-num-seqs", "1k", "--max_model_len=2.6k"),
        *("--block-size", "32", "--gpu-memory-utilization", "0.9", "--long-prefill-token-threshold", "512"),
        *("--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--seed", "7", "--dtype", "bfloat16"),
        *("--served-model-name", "a", "b", "--scheduling-policy", "priority", "--swap-space", "2"),
        *("--tensor-parallel-size", "1", "-pp", "1", "--kv-cache-memory-bytes", "1G", "--api-key", "x", "y"),
        *("-q", "int8", "--max-num-queued-reqs", "9", "--revision", "v1", "--download-dir", "/d"),
        *("--kv-cache-dtype", "fp8", "--max-num-scheduled-tokens", "3K", "--generation-config", "vllm"),
        *("--override-generation-config", '{"temperature": 0.5, "top_k": 20}'),
    )
    assert made.model == "org/model"
    assert (made.max_num_batched_tokens, made.max_num_seqs, made.max_model_len) == (4096, 1000, 2600)
    assert (made.block_size, made.gpu_memory_utilization, made.long_prefill_token_threshold) == (32, 0.9, 512)
    assert (made.enable_chunked_prefill, made.enable_prefix_caching, made.seed) == (False, False, 7)
    assert (made.dtype, made.served_model_names, made.served_model_name) == ("bfloat16", ("a", "b"), "a")
    assert (made.scheduling_policy, made.swap_space_gibibytes) == (SchedulingPolicy.PRIORITY, 2.0)
    assert (made.kv_cache_mebibytes, made.api_keys, made.quantization) == (1024, ("x", "y"), "int8")
    assert (made.max_num_queued, made.revision, made.download_dir) == (9, "v1", "/d")
    assert (made.kv_cache_dtype, made.max_num_scheduled_tokens, made.generation_config) == ("fp8", 3072, "vllm")
    assert made.override_generation_config == {"temperature": 0.5, "top_k": 20}


def test_flags_of_our_own() -> None:
    made = serve(
        *("--model", "/", "--max-num-batched-tokens", "auto", "--tbt-target-ms", "50", "--preemption-mode", "swap"),
        *("--batching", "vllm", "--num-speculative-tokens", "4", "--stall-seconds", "5", "--batch-invariant"),
    )
    assert (made.max_num_batched_tokens, made.token_budget) == (None, TokenBudget.AUTO)
    assert (made.tbt_target_milliseconds, made.preemption_mode) == (50.0, PreemptionMode.SWAP)
    assert (made.batching, made.num_speculative_tokens, made.stall_seconds) == (Batching.VLLM, 4, 5.0)
    assert made.batch_invariant


def test_what_is_not_given_is_left_to_the_plan() -> None:
    made = serve("org/model")
    assert made.max_num_batched_tokens is made.max_num_seqs is made.max_model_len is made.enable_chunked_prefill is None
    assert serve("org/model", "--max-model-len", "auto").max_model_len is None
    assert serve("org/model", "--max-model-len", "-1").max_model_len is None
    assert made.served_model_names == ("org/model",)


@pytest.mark.parametrize(
    ("text", "value"), [("512", 512), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("2M", 2**21), ("1g", 10**9)]
)
def test_counts_are_written_as_in_vllm(text: str, value: int) -> None:
    assert count(text) == value


@pytest.mark.parametrize("text", ["1.5K", "many", "", "1kk"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--port", "1", "org/model"],
        ["serve", "org/model", "--port", "1"],
        ["serve", "--model", "org/model"],
        ["serve", "--model", "org/model", "org/model"],
        ["generate", "--prompt", "x", "org/model"],
        ["batch", "in", "out", "--model", "org/model"],
        ["check", "--enforce-eager", "org/model"],
    ],
    ids=" ".join,
)
def test_the_model_may_stand_alone_anywhere(words: list[str]) -> None:
    assert _parsed(words).model == "org/model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve"], "a MODEL is needed"),
        (["serve", "org/a", "--model", "org/b"], "two models: org/b and org/a"),
        (["serve", "org/a", "b"], "unexpected 'b'"),
        (["serve", "org/a", "--enable-lora"], "unknown option --enable-lora"),
        (["serve", "org/a", "--max-num-batch-tokens", "9"], "did you mean --max-num-batched-tokens?"),
        (["serve", "org/a", "--enable-prefix-cache"], "did you mean --enable-prefix-caching?"),
        (["serve", "org/a", "--max-num"], "unknown option --max-num"),
        (["serve", "org/a", "--batching", "dynamic"], "expected one of sarathi, vllm,"),
        (["serve", "org/a", "--override-generation-config", "[1]"], "expected a JSON object, not '[1]'"),
        (["serve", "org/a", "--max-num-seqs", "some"], "--max-num-seqs: expected an integer such as"),
        (["serve", "org/a", "--ssl-keyfile", "k"], "unknown option --ssl-keyfile"),
    ],
)
def test_a_wrong_command_line_is_answered_with_what_is_wrong(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capfd.readouterr().err


def test_flags_without_effect_are_accepted_and_each_is_warned_of() -> None:
    removed = ["--disable-log-requests", "--num-scheduler-steps", "8", "--max-seq-len-to-capture=8192"]
    options = _parsed(
        ["serve", "m/m", *removed, "--no-async-scheduling", *["--optimization-level", "3"] * 2, "--port", "1"]
    )
    assert options.port == 1
    assert warnings_of(options) == [
        "--disable-log-requests has no effect: vLLM removed it",
        "--num-scheduler-steps has no effect: vLLM removed it",
        "--max-seq-len-to-capture has no effect: vLLM removed it",
        "--no-async-scheduling has no effect: the loop always schedules a step ahead",
        "--optimization-level has no effect: nothing is compiled, and the graphs of a GPU have sizes of their own; "
        "see --enforce-eager",
    ]


def test_no_flag_both_has_an_effect_and_has_none() -> None:
    flags = [flag for command in commands(make_parser()).values() for flag in command.flags()]
    assert set(flags_without_effect()) <= set(flags)  # and argparse itself refuses a flag that is added twice
    assert len(flags_without_effect()) == sum(len(flags) for flags in WITHOUT_EFFECT.values())


def test_keywords_of_the_offline_engine_are_the_same_flags() -> None:
    made, warnings = from_keywords(
        "org/model",
        {"max_model_len": 2048, "enable_prefix_caching": False, "dtype": "bfloat16", "seed": None}
        | {"max_num_batched_tokens": "4k", "served_model_name": ["a", "b"], "enforce_eager": True}
        | {"trust_remote_code": False, "disable_log_stats": True, "quantization": None},
    )
    assert made.usage is Usage.OFFLINE
    assert (made.max_model_len, made.enable_prefix_caching, made.dtype) == (2048, False, "bfloat16")
    assert (made.max_num_batched_tokens, made.served_model_names) == (4000, ("a", "b"))
    assert made.enforce_eager
    assert [warning.split()[0] for warning in warnings] == [
        "--no-trust-remote-code",
        "--disable-log-stats",
    ]


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_model_length": 1}, "unknown option --max-model-length; did you mean --max-model-len?"),
        ({"enable_lora": True}, "unknown option --enable-lora"),
        ({"enable_lora": False}, "unknown option --enable-lora"),
        ({"max_num_seqs": "some"}, "expected an integer"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: 2 is not supported"),
        ({"port": 1}, "unknown option --port"),
    ],
)
def test_a_wrong_keyword_is_one_error(keywords: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_keywords("org/model", keywords)


# --- the program -------------------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "/no/such/model.gguf"]) == 2
    printed = capfd.readouterr()
    assert printed.err == "poolwright-engine: --model: model path /no/such/model.gguf does not exist\n"
    assert printed.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL", "--dtype", "float16", "--device", "cpu"], "--dtype: float16 is not supported on a CPU"),
        (["MODEL", "--dtype", "float16"], "--dtype: float16 is not supported on a CPU"),
        (["MODEL", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype: fp8 needs a GPU"),
        (["MODEL", "--device", "cuda"], "--device: cuda was asked for, and this machine has no driver"),
        (["README.md"], "--model: README.md is neither a .gguf file nor a folder"),
        (["EMPTY"], "holds no model: neither config.json nor a .gguf file"),
    ],
)
def test_what_can_be_seen_at_once_is_refused_before_anything_is_opened(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "cuda_driver_is_there", lambda: False)
    monkeypatch.setitem(main_module._COMMANDS, "serve", lambda *_: pytest.fail("it was started"))
    (tmp_path / "README.md").write_text("for people")
    for name in ("MODEL/config.json", "EMPTY/notes.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    assert main(["serve", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_explains_every_option(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    out = capfd.readouterr().out
    assert f"usage: {PROGRAM}" in out
    parser = commands(make_parser()).get(command)
    for action in parser._actions if parser else ():
        if action.help is not argparse.SUPPRESS and action.option_strings:
            assert action.help or action.option_strings[0] in ("--prompt", "--temperature", "--log-level")
            assert action.option_strings[-1] in out


def test_version_prints_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capfd.readouterr().out == f"{version('poolwright')}\n" * 2


def test_help_and_a_wrong_option_bring_no_torch() -> None:
    program = f"""
        import sys
        from poolwright_engine.cli import main as cli
        for words in (["serve", "--help"], ["serve", "/none"], ["serve", "x", "--nosuch"], ["complete", "serve", "--"]):
            try:
                cli.main(words)
            except SystemExit:
                pass
        print([name for name in {["torch", "fastapi", "huggingface_hub", "tokenizers"]!r} if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


# --- completion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([""], COMMANDS),
        (["se"], ["serve"]),
        (["serve", "--max-num-b"], ["--max-num-batched-tokens"]),
        (["serve", "--batching", ""], [str(kind) for kind in Batching]),
        (["serve", "--batching", "or"], ["orca"]),
        (["serve", "--preemption-mode", "s"], ["swap"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["serve", "--model", ""], []),
        (["serve", "--num-scheduler"], []),
        (["nothing", "--"], []),
    ],
)
def test_what_is_offered(words: list[str], found: list[str]) -> None:
    assert shell_completion.candidates(make_parser(), words) == found


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    """The script as a user sources it, asked as bash asks it."""
    bash = shutil.which("bash")
    assert bash is not None
    program = tmp_path / PROGRAM
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m poolwright_engine "$@"\n')
    program.chmod(0o755)
    script = textwrap.dedent(
        f"""
        source <({PROGRAM} completion bash)
        ask() {{ COMP_WORDS=({PROGRAM} "$@"); COMP_CWORD=$#; _poolwright_engine; echo "${{COMPREPLY[@]}}"; }}
        ask ba
        ask serve --stall
        ask serve --scheduling-policy ''
        """
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([bash, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["batch", "--stall-exit-seconds --stall-seconds", "fcfs priority"]


@pytest.mark.parametrize("shell", list(shell_completion.SHELLS))
def test_each_shell_has_its_script(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capfd.readouterr().out
    assert f"{PROGRAM} complete" in text
    assert "{program}" not in text
