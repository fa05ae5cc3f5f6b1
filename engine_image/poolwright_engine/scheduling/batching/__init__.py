"""How steps are formed: one small strategy for each system, all over the same scheduler.

A strategy says in which order sequences get tokens of a step, and how many; the scheduler does the rest (memory,
seats, prefix hits, preemption, rows). It never changes a sequence itself.
"""
