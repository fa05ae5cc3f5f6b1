"""The pure policy: values in, decisions with reasons out. No time, no sockets, no client, no unseeded randomness."""
