"""Layouts of a training job over GPUs, and the rules of each trainer. Uses only the standard library."""
