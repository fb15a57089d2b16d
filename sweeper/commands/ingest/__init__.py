"""Import other tools' results into the same store: detect and read files, and derive this project's metrics."""
