"""Ports of an engine: what cannot be listened on is said by the name of its option."""

import socket
from dataclasses import replace

import pytest

from poolwright_engine.cli.check import of_server
from poolwright_engine.process.config import ConfigError, EngineConfig
from poolwright_engine.process.ports import listener, options_taken

ANY = EngineConfig(
    model="/m", served_model_names=("m",), pod_uid="uid", host="127.0.0.1", port=0, admin_port=0, kv_port=0
)


def test_a_port_that_is_taken_is_said_by_its_option() -> None:
    with listener("--port", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert options_taken(ANY) == []
        assert options_taken(replace(ANY, admin_port=port)) == ["--admin-port"]
        with pytest.raises(ConfigError, match=rf"^--port: cannot listen on 127\.0\.0\.1:{port}: "):
            listener("--port", "127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    elsewhere = replace(ANY, host="192.0.2.1")  # of the block for documentation, RFC 5737
    with pytest.raises(ConfigError, match=r"^--port: cannot listen on 192\.0\.2\.1:0: "):
        options_taken(elsewhere)


def test_looking_leaves_the_ports_free() -> None:
    with listener("--port", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    assert options_taken(replace(ANY, kv_port=port)) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_check_says_what_every_option_of_the_server_comes_to() -> None:
    config = replace(
        ANY,
        port=1234,
        admin_port=1235,
        kv_port=0,
        api_keys=("a", "b"),
        sse_keep_alive_seconds=0.0,
        shutdown_timeout_seconds=3.5,
        stall_seconds=4.0,
        stall_exit_seconds=50.0,
    )
    assert of_server(config, ["--port"]) == {
        "listens on": "127.0.0.1, port 1234, admin port 1235, KV port any; taken now: --port",
        "API keys": "2, of which clients of /v1 must bring one",
        "silent streams": "no comments",
        "without progress": "/ready is 503 after 4 s, and the process ends after 50 s",
        "at SIGTERM": "running requests have 3.5 s to finish",
    }
    assert of_server(ANY)["API keys"] == "none: clients of /v1 need none"
    assert of_server(ANY)["silent streams"] == "a comment every 15 s"
