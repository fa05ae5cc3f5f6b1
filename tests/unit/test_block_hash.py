"""Keys agree between processes, and differ where anything that KV depends on does."""

import subprocess
import sys

from poolwright_protocol.block_hash import KEY_BYTES, block_key, block_keys, root_key

TOKENS = list(range(1000, 1050))


def keys(tokens: list[int] = TOKENS, **extra: str) -> list[bytes]:
    return list(block_keys(root_key(**extra), tokens, 16))


def test_only_full_blocks_have_keys() -> None:
    assert len(keys()) == 3
    assert keys(TOKENS[:15]) == []
    assert all(len(key) == KEY_BYTES for key in keys())


def test_a_key_covers_every_token_before_it() -> None:
    other = keys([7, *TOKENS[1:]])
    assert not set(other) & set(keys())
    assert keys([*TOKENS[:33], 7, *TOKENS[34:]])[:2] == keys()[:2]
    assert keys([*TOKENS[:33], 7, *TOKENS[34:]])[2] != keys()[2]


def test_the_same_words_in_another_field_are_another_key() -> None:
    alone = [keys(), keys(salt="x"), keys(adapter="x"), keys(salt="xadapterx"), keys(salt="x", adapter="x")]
    assert len({key for some in alone for key in some}) == 15
    assert keys(salt="", model="m") == keys(model="m")


def test_where_the_chain_was_cut_does_not_matter() -> None:
    first, second, _ = keys()
    assert block_key(first, TOKENS[16:32]) == second


def test_another_process_makes_the_same_keys() -> None:
    program = (
        "from poolwright_protocol.block_hash import *\n"
        "print([k.hex() for k in block_keys(root_key(salt='s', model='m'), list(range(1000, 1050)), 16)])"
    )
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert ran.stdout.decode().strip() == str([key.hex() for key in keys(salt="s", model="m")])


def test_the_formula_is_what_pods_of_other_versions_have() -> None:
    assert root_key().hex() == "ab00349049018cdbcaa57f93f9bceda4"
    assert keys(model="m")[0].hex() == "a5d9a0bc4855244656ccc6be4d180877"
