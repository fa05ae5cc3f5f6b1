"""KV between machines: a prompt computed on one, decoded on another. Owns sockets, leases and attempts.

Knows the loop and the wire format; no device, no HTTP API, no text.
"""
