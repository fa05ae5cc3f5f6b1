"""Penalties, guides, biases, guesses and log probabilities through the real loop: a request answers the same alone as
in a crowd with too little memory, where it loses its seat and takes another."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.loop.observer import Observer
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.scheduler_config import PreemptionMode
from poolwright_engine.scheduling.sequence import FinishReason, Guide, GuideKind, Request, SamplingParams, TokenOutput
from support.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CHOICES = json.dumps(["a long answer", "a short one", "neither of them"])


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, **changes})  # type: ignore[arg-type]


KINDS = (
    params(temperature=0.0, ignore_eos=True),
    params(temperature=0.0, ignore_eos=True, frequency_penalty=1.5),
    params(temperature=0.9, seed=1, logprobs=2, ignore_eos=True),
    params(seed=2, top_p=0.8, top_k=30, min_p=0.01, repetition_penalty=1.3, min_tokens=12),
    params(seed=3, guide=Guide(GuideKind.CHOICE, CHOICES), frequency_penalty=0.5),
    params(seed=4, guide=Guide(GuideKind.REGEX, "(ab|cd){3,20}"), min_tokens=20),
    params(seed=5, logit_bias=tuple((token, 5.0) for token in range(40, 44)), presence_penalty=0.3, prompt_logprobs=1),
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


class Preemptions(Observer):
    def __init__(self) -> None:
        self.count = 0

    def preempted(self, *_: object, **__: object) -> None:
        self.count += 1


def engine_of(loaded: LoadedModel, num_blocks: int, observer: Observer | None = None, **changes: object) -> EngineLoop:
    tokenizer = loaded.tokenizer
    runner = CpuRunner(
        loaded.model,
        num_blocks,
        block_size=4,
        max_num_seqs=8,
        cpu_threads=1,
        num_host_blocks=24,
        eos_token_ids=tokenizer.eos_ids,
        guides=Guides(tokenizer, loaded.config.vocab_size),
    )
    config = LoopConfig(**{"max_model_len": 120, "max_num_batched_tokens": 16, "max_num_seqs": 8, **changes})  # type: ignore[arg-type]
    return EngineLoop(
        runner,
        config=config,
        identity=Identity(pod_uid="uid"),
        eos_token_ids=tokenizer.eos_ids,
        observer=observer or Observer(),
    )


def requests() -> list[Request]:
    prompts = [tuple((7 * i + 3 * j) % 250 for j in range(5 + 6 * i)) for i in range(len(KINDS))]
    return [
        Request(str(index), prompt, wanted) for index, (prompt, wanted) in enumerate(zip(prompts, KINDS, strict=True))
    ]


async def answer(engine: EngineLoop, request: Request) -> list[TokenOutput]:
    return [output async for output in engine.generate(request)]


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[list[TokenOutput]]:
    async def run() -> list[list[TokenOutput]]:
        engine = engine_of(loaded, num_blocks=200, max_num_batched_tokens=120)
        await engine.start()
        try:
            return [await answer(engine, request) for request in requests()]
        finally:
            await engine.close()

    return asyncio.run(run())


def test_each_kind_answers_as_it_was_asked(loaded: LoadedModel, alone: list[list[TokenOutput]]) -> None:
    assert [outputs[-1].error for outputs in alone] == [None] * len(KINDS)
    answers = [tokens(outputs) for outputs in alone]
    assert len({tuple(answer) for answer in answers}) == len(KINDS)
    assert len(answers[3]) >= 12
    *text, end = answers[4]
    assert loaded.tokenizer.decode(text) in json.loads(CHOICES)
    assert end in loaded.tokenizer.eos_ids
    assert sum(token in range(40, 44) for token in answers[6]) > len(answers[6]) // 4
    logprobs = [entry for output in alone[2] for entry in output.logprobs]
    assert [entry.token_id for entry in logprobs] == answers[2]
    assert all(len(entry.top) == 2 and entry.rank >= 1 for entry in logprobs)
    prompt = requests()[6].prompt_ids
    (of_prompt,) = [output.prompt_logprobs for output in alone[6] if output.prompt_logprobs is not None]
    assert [entry.token_id for entry in of_prompt] == list(prompt[1:])


@pytest.mark.parametrize("guesses", [0, 3])
@pytest.mark.parametrize("preemption", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
async def test_a_crowd_without_memory_changes_no_token(
    loaded: LoadedModel, alone: list[list[TokenOutput]], preemption: PreemptionMode, guesses: int
) -> None:
    seen = Preemptions()
    engine = engine_of(
        loaded, num_blocks=42, observer=seen, preemption=preemption, speculative_ngram_tokens=guesses, watermark=0.0
    )
    await engine.start()
    try:
        crowd = await asyncio.gather(*(answer(engine, request) for request in requests()))
        again = await asyncio.gather(
            *(answer(engine, replace(each, request_id=f"{each.request_id}b")) for each in requests())
        )
    finally:
        await engine.close()
    assert seen.count > 0
    for expected, first, second in zip(alone, crowd, again, strict=True):
        assert tokens(first) == tokens(expected)
        assert tokens(second) == tokens(expected)
        assert first[-1].finish_reason == expected[-1].finish_reason


async def test_a_guide_that_fails_in_the_engine_ends_its_request_alone(
    loaded: LoadedModel, alone: list[list[TokenOutput]]
) -> None:
    engine = engine_of(loaded, num_blocks=100)
    await engine.start()
    try:
        bad = Request("bad", (1, 2, 3), params(guide=Guide(GuideKind.REGEX, "(")))
        failed, good = await asyncio.gather(answer(engine, bad), answer(engine, requests()[1]))
    finally:
        await engine.close()
    assert failed[-1].finish_reason is FinishReason.ERROR
    assert "unclosed group" in str(failed[-1].error)
    assert tokens(good) == tokens(alone[1])
