"""The `ModelRunner` of a machine without an accelerator: its thread, its seats, its draws.

Knows neither the other device nor files nor scheduling beyond the steps it is given.
"""
