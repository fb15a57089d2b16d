"""Layouts that divide a training job among GPUs, and each trainer's rules for them. Uses only the standard library."""
