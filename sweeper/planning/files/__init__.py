"""Layouts as files that trainers run, and the same files and trainers' logs read as layouts."""
