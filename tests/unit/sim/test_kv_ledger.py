"""The KV ledger says what its factors say, in bytes, GiB and GB, and which share of a link that is."""

import pytest

from poolwright.sim.kv_ledger import (
    GB,
    GIB,
    MODELS,
    PLACEMENTS,
    KVLedger,
    distserve_ledger,
    ledger_of,
    lines,
    network_link,
)


def test_opt_66b_at_512_tokens_is_1_125_gib_and_96_6_gbps() -> None:
    ledger = ledger_of(MODELS["opt-66b"], 512, 10.0)
    assert ledger.bytes_per_token == 2 * 64 * 72 * 128 * 2
    assert ledger.request_bytes == 1.125 * GIB
    assert ledger.request_bytes / GB == pytest.approx(1.208, abs=5e-4)
    assert ledger.gbps == pytest.approx(96.6, abs=0.05)


def test_three_placements_have_their_shares_and_times() -> None:
    ledger = ledger_of(MODELS["opt-66b"], 512, 10.0)
    slow, fast, nvlink, one_way = (ledger.over(link) for link in PLACEMENTS)
    assert [round(p.share, 3) for p in (slow, fast, nvlink)] == [3.865, 0.121, 0.02]
    assert [round(p.seconds * 1e3, 1) for p in (slow, fast, nvlink)] == [386.5, 12.1, 2.0]
    assert one_way.share == pytest.approx(2 * nvlink.share)


def test_paper_s_figures_are_named_as_gib_read_as_gb() -> None:
    said = "\n".join(distserve_ledger())
    for figure in ("1.125 GiB = 1.208 GB", "96.6 Gbps", "1.13 GB and 90 Gbps", "GiB read as GB", "386.5%", "12.1%"):
        assert figure in said
    assert "more than it carries" in next(line for line in distserve_ledger() if "25 Gbps" in line)


def test_grouped_heads_cost_as_many_times_less_as_they_share() -> None:
    model = MODELS["llama-70b"]
    assert model.attention == "GQA"
    assert model.shape.bytes_per_token == 327_680
    said = lines(ledger_of(model, 2048, 1.0), model=model)
    assert "8 times less" in said[1]
    assert "640" in f"{ledger_of(model, 2048, 1.0).request_bytes / (1 << 20):.0f}"
    assert "times less" not in lines(ledger_of(MODELS["opt-66b"], 1, 1.0), model=MODELS["opt-66b"])[1]


def test_links_side_by_side_share_the_rate_but_not_a_request() -> None:
    one, four = (KVLedger("m", 1000, 10.0, 5.0, links) for links in (1, 4))
    link = network_link(1)
    assert one.over(link).share == pytest.approx(4 * four.over(link).share)
    assert one.over(link).seconds == four.over(link).seconds


@pytest.mark.parametrize("wrong", [{"links": 0}, {"bytes_per_token": 0}, {"kv_tokens": -1.0}])
def test_a_ledger_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    given = {"name": "m", "bytes_per_token": 1, "kv_tokens": 1.0, "requests_per_second": 1.0, "links": 1}
    with pytest.raises(ValueError, match="ledger needs"):
        KVLedger(**{**given, **wrong})  # type: ignore[arg-type]
