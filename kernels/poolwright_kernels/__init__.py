"""Attention over a paged KV cache: PyTorch references, and the plan that a step builds for them once."""
