"""Text and token ids: the tokenizer of a model, and what is found in text as it comes. Knows no request and no HTTP."""
