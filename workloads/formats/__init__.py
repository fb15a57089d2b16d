"""Read and write trainers' files, and read trainers' logs. Standard library and PyYAML only."""
