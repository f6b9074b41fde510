"""The serving engine, and the OpenAI-compatible server on top of it."""
