"""Decoders of the Llama kind: their shapes, and what is shared by all workloads that compute with them."""
