"""Options that cannot work are refused by name, in one line, before anything is loaded."""

from pathlib import Path

import pytest

from poolwright_engine.cli import main
from poolwright_engine.config import ConfigError, EngineConfig, from_environment
from poolwright_protocol import names
from poolwright_protocol.roles import Role


def config(**changes: object) -> EngineConfig:
    return EngineConfig(model=Path("model.gguf"), served_model_name="m", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: 2 is not supported"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"data_parallel_size": 3}, "--data-parallel-size"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-seqs"),
        ({"block_size": 0}, "--block-size"),
        ({"kv_cache_mebibytes": -1}, "--kv-cache-mebibytes"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"port": 70000}, "--port"),
        ({"port": 8001}, "must differ"),
        ({"cpu_duty_percent": 0}, "--cpu-duty-percent"),
        ({"cpu_threads": 0}, "--cpu-threads"),
        ({"dtype": "int4"}, "--dtype"),
        ({"shutdown_timeout_seconds": -1.0}, "--shutdown-timeout"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "--no-enable-chunked-prefill"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refusal:
        config(**changes)
    assert "\n" not in str(refusal.value)


def test_without_chunking_a_step_must_hold_the_longest_prompt() -> None:
    whole = config(enable_chunked_prefill=False)
    whole.check_model_len(2048)
    with pytest.raises(ConfigError, match=r"2048.*4096"):
        whole.check_model_len(4096)


def test_ports_of_zero_may_repeat() -> None:
    assert config(port=0, admin_port=0, kv_port=0).port == 0


def test_peers_connect_to_the_pod_ip_when_there_is_one() -> None:
    assert config(pod_ip="10.0.0.7").advertised_host == "10.0.0.7"
    assert config(host="127.0.0.3").advertised_host == "127.0.0.3"
    assert config().advertised_host == "127.0.0.1"


def test_the_environment_says_who_and_where_the_machine_is() -> None:
    found = from_environment(
        {
            names.ENV_ROLE: "token",
            names.ENV_ROLE_EPOCH: "7",
            names.ENV_POD_UID: "uid-1",
            names.ENV_POD_IP: "10.0.0.7",
            names.ENV_POOL: "chat",
            names.ENV_POOL_NAMESPACE: "default",
            names.ENV_POOL_KEY: "ab" * 32,
        }
    )
    assert config(**found) == config(
        role=Role.TOKEN,
        role_epoch=7,
        pod_uid="uid-1",
        pod_ip="10.0.0.7",
        pool="chat",
        pool_namespace="default",
        pool_key=bytes.fromhex("ab" * 32),
    )


def test_an_empty_environment_gives_no_role_and_a_key_that_nobody_knows() -> None:
    one, other = from_environment({}), from_environment({})
    assert one["role"] is None
    assert one["role_epoch"] == 0
    assert len(one["pool_key"]) == 32  # type: ignore[arg-type]
    assert one["pool_key"] != other["pool_key"]
    assert one["pod_uid"] != other["pod_uid"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (names.ENV_ROLE, "Prompt"),
        (names.ENV_ROLE_EPOCH, "-1"),
        (names.ENV_ROLE_EPOCH, "1.5"),
        (names.ENV_POOL_KEY, "secret"),
    ],
)
def test_a_bad_variable_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_environment({name: value})


def test_the_pool_key_is_not_printed() -> None:
    assert "abab" not in repr(config(pool_key=bytes.fromhex("ab" * 32)))


def test_a_path_that_does_not_exist_is_one_line_and_exit_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "/no/such/model.gguf"]) == 2
    printed = capfd.readouterr()
    assert printed.err == "poolwright-engine: --model: model path /no/such/model.gguf does not exist\n"
    assert printed.out == ""


def test_an_unknown_option_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "m", "--enable-lora"])
    assert ended.value.code == 2
    assert "--enable-lora" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"]])
def test_help_explains_every_option(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "usage: poolwright-engine" in capfd.readouterr().out


def test_version_prints_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capfd.readouterr().out.strip()
