"""What a run came to, and what tokens cost at a given price."""

from poolwright_engine.offline.throughput import Throughput


def test_rates_and_prices_are_the_tokens_over_the_time_and_the_money() -> None:
    counted = Throughput()
    counted.add(1000, 200)
    counted.add(500, 300, failed=False)
    counted.add(0, 0, failed=True)
    lines = counted.report(seconds=10.0, cost_per_hour=3.6)  # a cent in all
    text = "\n".join(lines)
    assert "3, 1 of them failed" in text
    assert "1500 of prompts, 500 of output" in text
    assert "prompt 150 tokens/s, output 50 tokens/s" in text
    assert "$0.010000 at $3.6 an hour" in text
    assert "200,000 (prompt and output), 50,000 (output)" in text  # tokens per dollar
    assert "5.0000 (prompt and output), 20.0000 (output)" in text  # dollars per million


def test_without_a_price_nothing_is_said_of_money() -> None:
    counted = Throughput()
    counted.add(10, 10)
    assert "$" not in "\n".join(counted.report(1.0))


def test_nothing_done_costs_nothing_a_token() -> None:
    assert "per million" not in "\n".join(Throughput().report(0.0, 1.0))
    counted = Throughput()
    counted.add(10, 0)
    assert "(output)" not in counted.report(1.0, 1.0)[-1]
