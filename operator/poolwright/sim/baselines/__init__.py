"""Published ways of sizing and feeding pools, behind the simulator's `Policy`: a file each, its source cited in it.

What a source decides is decided here as its source decides it; machines, steps, network and batching are the
simulator's for everybody. It knows nothing of Poolwright's own policy. Deviations: docs/reference/baselines.md.
"""
