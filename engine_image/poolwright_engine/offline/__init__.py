"""The engine without a server: `LLM`, and the verbs that run a piece of work and end. Knows no ports and no peers."""
