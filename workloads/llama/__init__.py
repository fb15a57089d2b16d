"""Llama and Qwen2 decoders: shapes, FLOPs, the model and its kernels, checkpoints and training data."""
