"""The arithmetic of a step against counting it, weight by weight and pair by pair."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from poolwright_engine.checkpoint.loader import load_model
from poolwright_protocol.flops import ComputeShape
from support.tiny_llama import write_tiny_llama

SHAPE = ComputeShape(
    hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, head_size=16, vocab_size=320, windows=(None, 5, 1)
)


@given(start=st.integers(0, 20), length=st.integers(0, 20))
def test_attention_counts_each_pair_that_the_mask_lets_through(start: int, length: int) -> None:
    pairs = sum(
        min(position + 1, window or position + 1)
        for window in SHAPE.windows
        for position in range(start, start + length)
    )
    assert SHAPE.attention_flops(start, length) == 2 * 2 * pairs * SHAPE.heads * SHAPE.head_size


@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_a_prompt_costs_the_same_however_it_is_cut(cuts: list[int]) -> None:
    starts = [sum(cuts[:index]) for index in range(len(cuts))]
    whole = SHAPE.flops([(0, sum(cuts))], num_logits=1)
    assert SHAPE.flops(zip(starts, cuts, strict=True), num_logits=1) == whole


def test_products_cost_two_operations_for_each_weight_and_token(tmp_path: Path) -> None:
    model = load_model(write_tiny_llama(tmp_path)).model
    *layers, head = [product.out_features * product.in_features for product in model.weights.products()]
    shape = model.config.compute_shape()
    assert shape.linear_flops_per_token == 2 * sum(layers)
    assert shape.flops([], num_logits=3) == 2 * 3 * head
    assert shape.flops([(0, 7)], num_logits=0) == 7 * 2 * sum(layers) + shape.attention_flops(0, 7)
