"""DistServe's example of what a split moves (OSDI 2024, section 3.3), against the planner's KV ledger."""

from bench.published.figure import Figure, exactly

from poolwright.sim.kv_ledger import GB, GIB, MODELS, PLACEMENTS, ledger_of

MODEL, PROMPT_TOKENS, REQUESTS_PER_SECOND = "opt-66b", 512, 10.0


def figures() -> list[Figure]:
    ledger = ledger_of(MODELS[MODEL], PROMPT_TOKENS, REQUESTS_PER_SECOND)
    slow, fast, nvlink = (ledger.over(link) for link in PLACEMENTS[:3])
    by = "`poolwright ledger`"
    paper = "DistServe, section 3.3"
    units = f"the paper's GB are GiB: {ledger.request_bytes / GIB:.3f} GiB"
    return [
        Figure("KV of a request, OPT-66B, 512 tokens", paper, exactly(1.13), ledger.request_bytes / GB, by, " GB",
               remark=units),
        Figure("KV of ten requests a second", paper, exactly(90), ledger.gbps, by, " Gbps", 1, remark=units),
        Figure("the same, as a share of 25 Gbps", "DistServe, sections 3.3 and 6.1", exactly(3.62), slow.share, by,
               remark="more than the link carries"),
        Figure("the same, as a share of 800 Gbps", paper, exactly(0.113), fast.share, by, digits=3),
        Figure("the same, as a share of NVLink's 600 GB/s", "DistServe, section 6.1: the link alone", None,
               nvlink.share, by, digits=3, remark=f"{nvlink.seconds * 1e3:.1f} ms a request"),
    ]  # fmt: skip
