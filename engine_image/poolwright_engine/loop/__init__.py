"""The engine as one running thing: the thread that schedules and submits steps, what may be asked of it, what it says.

Owns threads, roles and the order of steps. Knows devices only as a `ModelRunner`; no torch, HTTP, text or sockets.
"""
