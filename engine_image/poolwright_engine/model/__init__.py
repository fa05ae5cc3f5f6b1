"""A model in PyTorch: its numbers, its weights, and its forward pass over a paged KV cache on a CPU.

Owns arithmetic. Knows no files (`checkpoint`), no sequences, no sampling, no scheduling.
"""
