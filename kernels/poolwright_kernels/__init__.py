"""The operations of a step over a paged KV cache, each a Triton kernel beside its PyTorch reference; and plans."""
