"""A block is free, owned or fenced, and never two of these."""

import pytest

from poolwright_engine.blocks import BlockPool


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(8)
    assert pool.total == 7
    taken = pool.allocate(7)
    assert taken is not None
    assert sorted(taken) == list(range(1, 8))


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


def test_a_fenced_block_is_free_only_after_its_last_writer_was_read() -> None:
    pool = BlockPool(3)
    taken = pool.allocate(2)
    assert taken is not None
    pool.free(taken, fence=5)
    assert (pool.num_free, pool.num_owned, pool.num_fenced) == (0, 0, 2)
    pool.step_read(4)
    assert pool.allocate(1) is None
    pool.step_read(5)
    assert (pool.num_free, pool.num_fenced) == (2, 0)


def test_a_fence_that_was_passed_holds_nothing_back() -> None:
    pool = BlockPool(3)
    pool.step_read(7)
    taken = pool.allocate(2)
    assert taken is not None
    pool.free(taken, fence=7)
    assert pool.num_free == 2


@pytest.mark.parametrize("wrong", [[1, 1], [2], [0], [99]])
def test_freeing_what_is_not_owned_is_refused_and_changes_nothing(wrong: list[int]) -> None:
    pool = BlockPool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(ValueError, match="not all owned"):
        pool.free(wrong)
    assert (pool.num_free, pool.num_owned) == (2, 1)


def test_a_cache_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)
