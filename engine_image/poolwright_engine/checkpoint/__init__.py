"""From files to a model: which formats and families are read, and that nothing in them is left out silently.

Knows no arithmetic of a forward pass, and nobody who uses the model. Where files come from is `process.source`.
"""
