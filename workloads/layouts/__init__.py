"""Layouts of a training over GPUs, and the rules of each trainer. Standard library only."""
