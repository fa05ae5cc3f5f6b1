"""What every side of Poolwright agrees on, spelled once: names, roles, tickets, KV sizes, buckets, hand-off messages.

Standard library only; router, operator, engine and simulator all import it, and it imports none of them.
"""
