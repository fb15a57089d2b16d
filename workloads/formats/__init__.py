"""Trainers' files and logs, read and written. Standard library and PyYAML only."""
