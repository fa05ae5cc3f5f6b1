"""What choosing a token depends on besides the logits, the same on every device: guides, counts, biases.

Draws nothing itself; that is `cpu` and `cuda`. Knows no torch, no batch and no model.
"""
