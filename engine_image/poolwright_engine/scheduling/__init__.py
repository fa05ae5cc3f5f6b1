"""Which tokens the next step computes: requests, blocks, budgets, the scheduler, and what it asks of a device.

Standard library only, and time is an argument, so that a simulator runs this very code. Knows no torch, no thread, no
text, no client; nothing of the engine is below it.
"""
