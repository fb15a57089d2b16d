"""Other tools' results, into the same store: recognised, read, computed again by this project's definitions."""
