"""The bundled engine: chunked prefill over a paged KV cache, an OpenAI server, and KV hand-off between machines."""
