"""What is said over HTTP: the OpenAI API as vLLM words it, the admin port, metrics.

Owns requests, refusals and answers. Knows the engine only as `loop.engine.Engine`; no torch, no device, no files.
"""
