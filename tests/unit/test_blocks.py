"""A block is free, held or fenced; what was computed in full is found again until its block is needed."""

import pytest

from poolwright_engine.scheduling.blocks import BlockPool, BrokenInvariant, HostBlocks


def pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, 4)


def take(it: BlockPool, count: int) -> list[int]:
    taken = it.allocate(count)
    assert taken is not None
    return taken


def test_the_null_block_is_never_given_out() -> None:
    it = pool(8)
    assert it.total == 7
    assert sorted(take(it, 7)) == list(range(1, 8))


def test_allocation_is_all_or_nothing() -> None:
    it = pool(4)
    assert it.allocate(4) is None
    assert it.num_free == 3
    assert it.allocate(0) == []


def test_the_block_freed_last_is_used_first() -> None:
    it = pool(8)
    taken = take(it, 3)
    it.free(taken)
    assert take(it, 2) == taken[:2]


def test_a_fenced_block_is_free_only_after_its_last_writer_was_read() -> None:
    it = pool(3)
    taken = take(it, 2)
    it.free(taken, fence=5)
    assert (it.num_free, it.num_owned, it.num_fenced) == (0, 0, 2)
    it.step_read(4)
    assert it.allocate(1) is None
    it.step_read(5)
    assert (it.num_free, it.num_fenced) == (2, 0)
    it.check([])


def test_a_fence_that_was_passed_holds_nothing_back() -> None:
    it = pool(3)
    it.step_read(7)
    it.free(take(it, 2), fence=7)
    assert it.num_free == 2


@pytest.mark.parametrize("wrong", [[1, 1], [2], [0], [99], [-1]])
def test_freeing_what_is_not_held_is_refused_and_changes_nothing(wrong: list[int]) -> None:
    it = pool(4)
    assert it.allocate(1) == [1]
    with pytest.raises(ValueError, match="not all held"):
        it.free(wrong)
    assert (it.num_free, it.num_owned) == (2, 1)


def test_a_shared_block_named_twice_in_one_free_is_refused() -> None:
    it = pool(4)
    taken = take(it, 1)
    it.touch(taken)
    with pytest.raises(ValueError, match="not all held"):
        it.free(taken * 2)
    it.free(taken)
    it.free(taken)
    assert it.num_free == it.total


def test_a_cache_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="null block"):
        pool(1)


def test_a_published_block_is_found_held_or_free_and_its_hit_leaves_the_middle_of_the_list() -> None:
    it = pool(6)
    first, second, third = take(it, 3)
    for block, key in ((first, b"a"), (second, b"b"), (third, b"c")):
        it.publish(block, key)
    assert it.find([b"a", b"b", b"x", b"c"]) == [first, second]
    it.free([first, second, third])
    assert it.num_free_among([first, second]) == 2
    it.touch(it.find([b"a", b"b"]))
    assert it.num_free == 3
    it.check([[first, second]])
    it.touch([first])
    it.check([[first, second], [first]])


def test_what_was_not_used_for_longest_is_evicted_the_tail_of_a_prefix_first() -> None:
    it = pool(7)
    old, new = take(it, 3), take(it, 2)
    for number, block in enumerate([*old, *new]):
        it.publish(block, b"%d" % number)
    it.free(old)
    it.free(new)
    assert take(it, 1) == [6]  # never used at all
    assert take(it, 2) == [old[2], old[1]]
    assert it.find([b"0"]) == [old[0]]
    assert it.find([b"1"]) == []
    it.touch([old[0]])
    it.free([old[0]])  # used again: the newer prefix goes before it
    assert take(it, 2) == [new[1], new[0]]


def test_a_key_belongs_to_the_block_that_had_it_first() -> None:
    it = pool(4)
    first, second = take(it, 2)
    it.publish(first, b"a")
    it.publish(second, b"a")
    assert it.find([b"a"]) == [first]
    it.free([first, second])
    it.check([])
    assert it.num_keyed == 1


def test_a_fenced_block_can_be_hit_and_outlives_its_fence() -> None:
    it = pool(3)
    taken = take(it, 1)
    it.publish(taken[0], b"a")
    it.free(taken, fence=3)
    it.touch(it.find([b"a"]))
    assert it.num_fenced == 0
    it.step_read(3)
    assert it.num_free == 1
    it.check([taken])


def test_forgetting_leaves_nothing_to_find_and_everything_held() -> None:
    it = pool(4)
    taken = take(it, 2)
    it.publish(taken[0], b"a")
    it.forget()
    assert it.find([b"a"]) == []
    it.check([taken])


@pytest.mark.parametrize("tables", [[[1, 2]], [[1]], [[1, 2, 3], [3]]])
def test_books_that_do_not_balance_are_found_out(tables: list[list[int]]) -> None:
    it = pool(6)
    take(it, 3)
    it.check([[1, 2, 3]])
    with pytest.raises(BrokenInvariant, match="holders"):
        it.check(tables)


def test_host_blocks_are_all_or_nothing_and_counted() -> None:
    host = HostBlocks(3)
    assert host.allocate(4) is None
    taken = host.allocate(2)
    assert taken is not None
    host.check([taken])
    with pytest.raises(BrokenInvariant):
        host.check([])
    host.free(taken)
    host.check([])
    assert host.num_free == 3
