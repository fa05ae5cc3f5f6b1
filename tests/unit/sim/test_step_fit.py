import pytest

from poolwright.sim import profiles
from poolwright.sim.step_fit import FixedPredictor, fit, prices
from poolwright.sim.step_time import Chunk
from poolwright_engine.scheduling.budget import StepWork
from support.linear_step_time import LinearStepTime, machine_model


def test_lines_are_found_again() -> None:
    step = LinearStepTime(prompt_token_seconds=1e-4, decode_seconds=1e-4)  # a token is a token to a profile
    fitted = fit(step)
    for cost in (fitted.profile.decode, fitted.profile.mixed):
        assert cost.fixed_seconds == pytest.approx(step.fixed_seconds, rel=1e-4)
        assert cost.kv_token_seconds == pytest.approx(step.kv_token_seconds, rel=1e-4)
    assert fitted.profile.decode.token_seconds == pytest.approx(step.decode_seconds, rel=1e-6)


def test_the_engines_predictor_does_not_learn_what_the_table_says_already() -> None:
    predictor = FixedPredictor(LinearStepTime())
    work = StepWork(8, 4000, has_prefill=False)
    before = predictor.predict(work)
    predictor.observe(work, 100.0)
    assert predictor.predict(work) == before == pytest.approx(LinearStepTime().seconds((), 8, 4000))


@pytest.mark.parametrize("name", ["h100-llama-70b-tp8", "h200-llama-8b-tp1", "splitwise-h100-llama2-70b-tp8"])
def test_prices_of_real_tables_are_near(name: str) -> None:
    model = profiles.machine(name)
    priced = prices(model)
    for decodes, context in ((1, 1000), (64, 1200), (200, 1200)):
        seconds = model.step_time.seconds((), decodes, decodes * context)
        assert priced.decode_seconds(decodes, decodes * context) == pytest.approx(seconds, rel=0.1)
    for tokens in (256, 1000, 2000, 5000):
        chunks = [Chunk(start, min(2048, tokens - start)) for start in range(0, tokens, 2048)]
        seconds = sum(model.step_time.seconds((chunk,), 0, 0) for chunk in chunks)
        assert priced.prefill_seconds(tokens) == pytest.approx(seconds, rel=0.2)


def test_memory_comes_with_the_prices() -> None:
    assert prices(machine_model(5000)).kv_capacity_tokens == 5000
