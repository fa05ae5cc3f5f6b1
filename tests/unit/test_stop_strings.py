"""Stop strings end a text where they begin, and nothing else is ever held back for long or lost."""

from hypothesis import given
from hypothesis import strategies as st

from poolwright_engine.text.stop_strings import StopStrings


def run(texts: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is sent for each text; the last entry is what the end releases."""
    watch = StopStrings(stops, include)
    sent: list[str] = []
    for text in texts:
        released, met = watch.push(text)
        sent.append(released)
        if met is not None:
            return sent, met
    return [*sent, watch.flush()], None


def test_a_stop_string_spread_over_tokens_is_never_sent() -> None:
    assert run(["DEF", "G", "HI", "J"], ["DEFGHIJ"]) == (["", "", "", ""], "DEFGHIJ")


def test_what_turns_out_to_be_no_stop_string_is_sent_in_full_and_at_once() -> None:
    assert run(["DEF", "G", "X"], ["DEFGHIJ"]) == (["", "", "DEFGX", ""], None)


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    assert run(["Hello", " world"], ["\n\n", "END"]) == (["Hello", " world", ""], None)


def test_only_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert run(["one\n", "two"], ["\n\n"]) == (["one", "\ntwo", ""], None)


def test_the_end_releases_what_was_held_back() -> None:
    assert run(["almost EN"], ["END"]) == (["almost ", "EN"], None)


def test_the_stop_string_can_be_kept() -> None:
    assert run(["a EN", "D b"], ["END"], include=True) == (["a ", "END"], "END")


def test_the_stop_string_that_ends_first_wins() -> None:
    assert run(["xabcy"], ["abc", "b"]) == (["xa"], "b")


def test_of_two_that_end_together_the_one_listed_first_wins() -> None:
    assert run(["xabc"], ["bc", "abc"]) == (["xa"], "bc")
    assert run(["xabc"], ["abc", "bc"]) == (["x"], "abc")


def test_stop_strings_of_wide_characters() -> None:
    assert run(["東", "京", "🦆"], ["京🦆"]) == (["東", "", ""], "京🦆")


letters = st.text(alphabet="ab", max_size=12)


@given(
    texts=st.lists(letters, max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_cutting_a_text_in_other_places_changes_nothing(texts: list[str], stops: list[str]) -> None:
    whole = "".join(texts)
    by_letter = run(list(whole), stops)
    by_part = run(texts, stops)
    assert ("".join(by_letter[0]), by_letter[1]) == ("".join(by_part[0]), by_part[1])
    ends = [(whole.find(stop) + len(stop), order) for order, stop in enumerate(stops) if stop in whole]
    if ends:
        end, order = min(ends)
        assert ("".join(by_part[0]), by_part[1]) == (whole[: end - len(stops[order])], stops[order])
    else:
        assert ("".join(by_part[0]), by_part[1]) == (whole, None)
