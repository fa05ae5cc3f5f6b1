"""Operations of the CPU engine in C, for machines that have a C compiler: what PyTorch does in several passes, in one.

Owns compiling, finding and calling them. Knows tensors, and nothing of models, sequences or steps.
"""
