"""Asynchronous reinforcement learning of language models with entropy-scaled trust regions (ESTR)."""
