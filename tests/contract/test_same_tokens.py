"""Whatever the engine does on the way, a greedy client gets transformers' tokens: prompts cut anywhere, found in the
prefix cache or not, preempted at any step, answered n times, streamed or not, under every batching policy. Through the
HTTP application, the real loop and the CPU runner."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from poolwright_engine.api.answer import Served
from poolwright_engine.api.server import create_app
from poolwright_engine.checkpoint.loader import LoadedModel, load_model
from poolwright_engine.cpu.runner import CpuRunner
from poolwright_engine.loop.engine_loop import EngineLoop, Identity, LoopConfig
from poolwright_engine.loop.observer import Observer
from poolwright_engine.process import assembly
from poolwright_engine.process.config import EngineConfig
from poolwright_engine.sampling.guide import Guides
from poolwright_engine.scheduling.batching.strategy import Strategy
from poolwright_engine.scheduling.scheduler import Batch, Scheduler
from poolwright_engine.scheduling.scheduler_config import Batching, PreemptionMode
from poolwright_protocol.kv import blocks_for
from poolwright_protocol.roles import Role, RolePut
from support.api_server import new_service
from support.covering import Case, all_cases, each_value, pairs_of, pairwise, values_of
from support.parity import Expected, ask_transformers, assert_greedy, assert_same_tokens, transformers_of_gguf
from support.tiny_models import write_tiny_model

ALL = 10_000  # a chunk that no prompt fills
DIMENSIONS: dict[str, list[Any]] = {
    "batching": list(Batching),
    "chunk": [1, 7, 16, 33, 64, ALL],
    "hit": [False, True],
    "preemption": [None, PreemptionMode.RECOMPUTE, PreemptionMode.SWAP],
    "n": [1, 3],
    "stream": [False, True],
}
SEATS = 5  # fewer than the sequences that n = 3 makes of the tiny prompts
REAL_SEATS = 12  # the same of the real ones


def allowed(case: Case) -> bool:
    """Policies that cut no prompt have no chunks."""
    return case["chunk"] == ALL or case["batching"].cuts_prompts


@dataclass(frozen=True)
class Interruptions:
    """Before which steps memory is taken: of those before `until` the ones that leave `phase` divided by `every`. After
    `until` all get on undisturbed, and so to their end."""

    every: int
    phase: int
    until: int

    def __contains__(self, step: int) -> bool:
        return step < self.until and step % self.every == self.phase


NEVER = Interruptions(1, 0, 0)


class Way(StrEnum):
    """What became of the memory that was taken before a step."""

    SWAPPED = "swapped"
    GIVEN_UP = "given up"
    NOBODY = "nobody"  # had any to take


@dataclass
class Seen(Observer):
    """Of one engine's life."""

    preemptions: list[bool] = field(default_factory=list)  # whether the sequence was swapped
    hit_tokens: int = 0
    steps: int = 0
    ways: dict[int, Way] = field(default_factory=dict)  # of the steps to interrupt, by number
    longest_chunk: int = 0  # of one prompt in one step
    most_prefill: int = 0  # of all prompts in one step

    def preempted(self, swapped: bool) -> None:
        self.preemptions.append(swapped)

    def prefix_lookup(self, queried_tokens: int, hit_tokens: int) -> None:
        self.hit_tokens += hit_tokens

    def step(self, num_tokens: int, num_prefill_tokens: int, busy_seconds: float) -> None:
        self.steps += 1
        self.most_prefill = max(self.most_prefill, num_prefill_tokens)


@dataclass
class Interrupting:
    """A strategy that takes the memory of one running sequence first, where it is to."""

    inner: Strategy
    interruptions: Interruptions
    seen: Seen

    def fill(self, scheduler: Scheduler, batch: Batch) -> None:
        if batch.number in self.interruptions and batch.number not in self.seen.ways:
            self.seen.ways[batch.number] = self._interrupt(scheduler, batch)
        self.inner.fill(scheduler, batch)
        for sequence in batch.prefilled:
            length = batch.rows[batch.sequences.index(sequence)].length
            self.seen.longest_chunk = max(self.seen.longest_chunk, length)

    def _interrupt(self, scheduler: Scheduler, batch: Batch) -> Way:
        victims = [sequence for sequence in scheduler.running if sequence.num_computed]
        if not victims:
            return Way.NOBODY
        victim = victims[batch.number // self.interruptions.every % len(victims)]
        scheduler._preempt(batch, victim)
        return Way.SWAPPED if victim.host_block_ids else Way.GIVEN_UP


def loop_config(case: Case, max_model_len: int, seats: int) -> LoopConfig:
    """A step has room for a chunk beside a token of everyone; how large a chunk is, the role says. `ALL`: for every
    prompt whole; where none is cut anyway, for the longest."""
    chunk, cuts = case["chunk"], case["batching"].cuts_prompts
    return LoopConfig(
        max_model_len=max_model_len,
        max_num_seqs=seats,
        max_num_batched_tokens=max_model_len * (seats if cuts else 1) if chunk == ALL else chunk + seats,
        quick_first_tokens=chunk != ALL,  # else it would cut some, once it knows what steps take
        batching=case["batching"],
        enable_prefix_caching=case["hit"],
        preemption=case["preemption"] or PreemptionMode.AUTO,
        static_window_seconds=0.01,
    )


@asynccontextmanager
async def serving(
    loaded: LoadedModel,
    config: LoopConfig,
    seen: Seen,
    block_size: int,
    num_blocks: int,
    interruptions: Interruptions = NEVER,
    chunk: int | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application. `chunk`: most tokens of prompts in a step."""
    tokenizer = loaded.tokenizer
    guides = Guides(tokenizer, loaded.config.vocab_size)
    runner = CpuRunner(
        loaded.model,
        num_blocks=num_blocks + 1,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        cpu_threads=torch.get_num_threads(),
        num_host_blocks=num_blocks,
        eos_token_ids=tokenizer.eos_ids,
        guides=guides,
    )
    engine = EngineLoop(
        runner, config=config, identity=Identity(pod_uid="uid"), eos_token_ids=tokenizer.eos_ids, observer=seen
    )
    engine.scheduler.strategy = Interrupting(engine.scheduler.strategy, interruptions, seen)
    async with answering(engine, Served(engine, tokenizer, runner.vocab_size, 8, guides)) as client:
        if chunk is not None:
            await engine.put_role(RolePut("uid", Role.MIXED, 1, max_prefill_tokens_per_step=chunk))
        yield client


@asynccontextmanager
async def answering(engine: EngineLoop, served: Served) -> AsyncIterator[httpx.AsyncClient]:
    """Starts the engine, and ends it."""
    service = new_service()
    await engine.start()
    service.metrics.attach(engine.stats, engine.role_state, {})
    service.served = served
    service.ready = True
    try:
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=600) as client:
            yield client
    finally:
        await engine.close()


async def complete(
    client: httpx.AsyncClient, prompt: Sequence[int], count: int, n: int, stream: bool
) -> list[list[int]]:
    """Token ids of each of the n choices. Several greedy ones are not to be had, so those take the likeliest token by
    top-k of 1."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0 if n == 1 else 1,
        "top_k": 1,
        "ignore_eos": True,
        "return_token_ids": True,
        "n": n,
        "stream": stream,
    }
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    ids: list[list[int]] = [[] for _ in range(n)]
    if not stream:
        for choice in answer.json()["choices"]:
            ids[choice["index"]] = choice["token_ids"]
        return ids
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for line in lines:
        for choice in json.loads(line)["choices"]:
            ids[choice["index"]].extend(choice["token_ids"] or [])
    return ids


async def assert_case(
    loaded: LoadedModel,
    answers: Sequence[Expected],
    case: Case,
    block_size: int = 4,
    seats: int = SEATS,
    interruptions: Interruptions = NEVER,
) -> Seen:
    """Prompts all at once, and once more where the case is a hit."""
    count = len(answers[0].output_ids)
    longest_prompt = max(len(expected.prompt_ids) for expected in answers)
    seen = Seen()
    config = loop_config(case, longest_prompt + count + 1, seats)
    num_blocks = 2 * seats * blocks_for(config.max_model_len, block_size)
    chunk = None if case["chunk"] == ALL else case["chunk"]
    async with serving(loaded, config, seen, block_size, num_blocks, interruptions, chunk) as client:
        for _ in range(1 + case["hit"]):
            asked: list[Awaitable[list[list[int]]]] = [
                complete(client, expected.prompt_ids, count, case["n"], case["stream"]) for expected in answers
            ]
            for expected, choices in zip(answers, await asyncio.gather(*asked), strict=True):
                for found in choices:
                    assert_same_tokens(found, expected)
    assert (seen.hit_tokens > 0) == case["hit"]
    if chunk is None:
        assert seen.longest_chunk >= longest_prompt
    else:
        assert chunk - block_size < seen.most_prefill <= chunk  # as chunks end on blocks, where they can
    return seen


async def assert_case_preempted_everywhere(loaded: LoadedModel, answers: Sequence[Expected], case: Case) -> None:
    """One run undisturbed; then, where the case preempts, as many as it takes for each of its steps to have been
    interrupted, in the way of the case, unless nobody had any memory then."""
    steps = (await assert_case(loaded, answers, case)).steps
    if case["preemption"] is None:
        return
    every = min(16, max(4, -(-steps // 8)))
    ways: dict[int, Way] = {}
    for phase in range(every):
        interruptions = Interruptions(every, phase, until=steps)
        seen = await assert_case(loaded, answers, case, interruptions=interruptions)
        assert len(seen.preemptions) == sum(way is not Way.NOBODY for way in seen.ways.values())
        ways |= seen.ways
    assert set(ways) == set(range(steps))
    wanted = Way.SWAPPED if case["preemption"] is PreemptionMode.SWAP else Way.GIVEN_UP
    assert set(ways.values()) == {wanted, Way.NOBODY}  # before the first step nobody has any
    # Nobody has any memory only between two rounds of requests; under static batching, between two batches.
    rounds = 1 + case["hit"]
    batches = len(answers) * case["n"] if case["batching"] is Batching.STATIC else 1
    assert sum(way is Way.NOBODY for way in ways.values()) <= 2 * rounds * batches


def name_of(case: Case) -> str:
    return "-".join(f"{name}={getattr(value, 'value', value)}" for name, value in case.items())


# --- tiny models -------------------------------------------------------------------------------------------------

TINY_PROMPTS = [
    tuple((7 * i * i + 3 * i) % 256 for i in range(70)),
    (11, 200, 3),
    tuple((91 * i + 5) % 256 for i in range(26)),
    (42,),
]
TINY_TOKENS = 10
PAIRWISE = pairwise(DIMENSIONS, allowed)
# The real model takes each of these values once: prompts cut within a block, at its end, and not at all; two answers to
# each are already more than there are seats. Every pair of all values is marked long.
REAL_DIMENSIONS = DIMENSIONS | {"chunk": [7, 16, ALL], "n": [1, 2]}
ONCE = each_value(REAL_DIMENSIONS, allowed)

Tiny = Callable[[str], tuple[LoadedModel, list[Expected]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, one_torch_thread: None) -> Tiny:
    """Made once each."""
    made: dict[str, tuple[LoadedModel, list[Expected]]] = {}

    def get(architecture: str) -> tuple[LoadedModel, list[Expected]]:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            theirs = write_tiny_model(folder, architecture)
            made[architecture] = load_model(folder), ask_transformers(theirs, TINY_PROMPTS, TINY_TOKENS)
        return made[architecture]

    return get


def test_the_pairwise_cases_cover_every_allowed_pair() -> None:
    covered = set().union(*(pairs_of(case) for case in PAIRWISE))
    assert covered == set().union(*(pairs_of(case) for case in all_cases(DIMENSIONS, allowed)))
    assert len(PAIRWISE) < 40


def test_the_cases_of_the_real_model_have_every_value() -> None:
    assert set().union(*map(values_of, ONCE)) == set().union(*map(values_of, all_cases(REAL_DIMENSIONS, allowed)))


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
async def test_a_tiny_model_gives_transformers_tokens(tiny: Tiny, case: Case) -> None:
    """Each case on one architecture; in turn, so that every architecture has several."""
    architectures = ("llama", "gemma3", "mistral-window", "qwen3", "gemma2", "qwen2-window")
    loaded, answers = tiny(architectures[PAIRWISE.index(case) % len(architectures)])
    await assert_case_preempted_everywhere(loaded, answers, case)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "part",
    all_cases({name: DIMENSIONS[name] for name in ("batching", "chunk")}, allowed),
    ids=name_of,
)
async def test_the_whole_product_on_a_tiny_model_gives_transformers_tokens(tiny: Tiny, part: Case) -> None:
    loaded, answers = tiny("llama")
    for case in all_cases(DIMENSIONS | {name: [value] for name, value in part.items()}, allowed):
        await assert_case_preempted_everywhere(loaded, answers, case)


# --- the real model ----------------------------------------------------------------------------------------------

TEXT = (
    "The lighthouse keeper climbed the stairs with a lamp, counting each of them as he had done for forty years. ",
    "In 1912 the harbour froze; nobody had seen that before, and the ships waited outside until March. ",
    "def area(width, height):\n    return width * height\n\n",
    "She wrote: “Bring bread, and the letters.” He brought only the letters, naïve as he was. ",
    "Prices rose by 3.5 % in the first quarter, 2.25 % in the second, and fell after that. ",
)
SHORT_LENGTHS = (1, 2, 5, 8, 9, 16, 17, 24)
LONG_LENGTHS = tuple(round(1500 ** (i / 63)) for i in range(64))


def real_prompts(loaded: LoadedModel, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Pieces of one text, each from somewhere else, so that no prompt begins as another does."""
    chance = random.Random(0)
    ids = loaded.tokenizer.encode("".join(chance.choices(TEXT, k=120)))
    assert len(ids) > max(lengths) + 500
    return [
        tuple(ids[at : at + length])
        for length, at in zip(lengths, chance.sample(range(500), len(lengths)), strict=True)
    ]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> LoadedModel:
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def short_answers(smollm2: LoadedModel, smollm2_path: Path) -> list[Expected]:
    prompts = real_prompts(smollm2, SHORT_LENGTHS)
    return ask_transformers(transformers_of_gguf(smollm2_path), prompts, count=5, keep_logits=6)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [*ONCE, *(pytest.param(case, marks=pytest.mark.long) for case in PAIRWISE if case not in ONCE)],
    ids=name_of,
)
async def test_the_real_model_gives_transformers_tokens(
    smollm2: LoadedModel, short_answers: list[Expected], case: Case
) -> None:
    """Preempted in every third of its first steps, where the case preempts."""
    interruptions = NEVER if case["preemption"] is None else Interruptions(every=3, phase=2, until=24)
    seen = await assert_case(smollm2, short_answers, case, 8, REAL_SEATS, interruptions)
    wanted = {PreemptionMode.SWAP: {Way.SWAPPED}, PreemptionMode.RECOMPUTE: {Way.GIVEN_UP}, None: set()}
    assert set(seen.ways.values()) - {Way.NOBODY} == wanted[case["preemption"]]


@pytest.mark.model
@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_64_prompts_of_up_to_1500_tokens_give_transformers_tokens_at_the_defaults_of_a_server(
    smollm2: LoadedModel, smollm2_path: Path
) -> None:
    """Of a machine without a GPU: forms of products as measured, steps paced, all that nobody has to say."""
    prompts = real_prompts(smollm2, LONG_LENGTHS)
    config = EngineConfig(model=str(smollm2_path), served_model_names=("tiny",), device="cpu")
    parts = assembly.load(config)
    assert (parts.plan.max_num_seqs, parts.plan.max_num_batched_tokens) == (128, 2048)
    engine = assembly.engine_loop(config, parts)
    assert engine.scheduler.pace is not None
    served = Served(engine, parts.tokenizer, parts.vocab_size, parts.max_chars_per_token, parts.guides)
    async with answering(engine, served) as client:
        found = await asyncio.gather(*(complete(client, prompt, 16, n=1, stream=True) for prompt in prompts))
    theirs = transformers_of_gguf(smollm2_path)
    for prompt, (output,) in zip(prompts, found, strict=True):
        assert len(output) == 16
        assert_greedy(theirs, prompt, output)
