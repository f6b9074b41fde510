"""The serving engine. Not there yet: `LLM` runs its own offline loop (`generate.py`)."""
