"""Read and write trainers' files, and read trainers' logs. Uses only the standard library and PyYAML."""
