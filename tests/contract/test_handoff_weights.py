"""KV is exchanged between machines with the same weights, and with no others: two trainings of one architecture have
files of the same names, shapes and sizes. Engines as a process assembles them, with a hand-off between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from poolwright_engine.handoff.exchange import KvExchange
from poolwright_engine.process import assembly
from poolwright_engine.process.config import EngineConfig
from support.engine_bed import POOL_KEY, Machine, Recorder, request, tokens
from support.tiny_models import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(40)]


@asynccontextmanager
async def assembled(folder: Path, uid: str) -> AsyncIterator[tuple[Machine, assembly.Parts]]:
    config = EngineConfig(
        model=str(folder),
        served_model_names=("tiny",),
        device="cpu",
        host="127.0.0.1",
        kv_port=0,
        kv_cache_mebibytes=1,
        max_num_seqs=4,
        cpu_threads=1,
        cpu_linear_form="rows",
        pod_uid=uid,
        pool_key=POOL_KEY,
    )
    parts, seen = assembly.load(config), Recorder()
    engine = assembly.engine_loop(config, parts, seen)
    exchange: KvExchange = assembly.kv_exchange(config, parts, engine)
    await engine.start()
    await exchange.start()
    try:
        yield Machine(uid, engine, parts.runner, seen, exchange), parts
    finally:
        await exchange.close()
        await engine.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("one", "copy", "other")}
    for name, folder in folders.items():
        write_tiny_model(folder, "llama", seed=int(name == "other"))
    return folders


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}


async def test_a_machine_with_a_copy_of_the_weights_computes_prompts_for_another(models: dict[str, Path]) -> None:
    async with assembled(models["one"], "p") as (p, _), assembled(models["copy"], "t") as (t, _):
        alone = await tokens(t.engine, request(PROMPT, 8))
        assert await tokens(t.engine, request(PROMPT[::-1], 8, p.ticket()))
        assert p.seen.served == 1
        assert t.seen.failures == []
        assert await tokens(p.engine, request(PROMPT, 8)) == alone


async def test_a_machine_with_another_training_of_the_model_computes_none(models: dict[str, Path]) -> None:
    assert sizes(models["one"]) == sizes(models["other"])
    async with assembled(models["one"], "p") as (p, p_parts), assembled(models["other"], "t") as (t, t_parts):
        assert p_parts.model == t_parts.model
        assert p_parts.fingerprint != t_parts.fingerprint
        found = await tokens(t.engine, request(PROMPT, 8, p.ticket()))
        assert t.seen.failures == [("receive", "declined")]
        assert p.seen.served == 0
        assert found == await tokens(t.engine, request(PROMPT, 8))
        assert found != await tokens(p.engine, request(PROMPT, 8))
        # Nor is a block of one found under the other's keys.
        assert t.engine.scheduler.config.model_identity != p.engine.scheduler.config.model_identity
