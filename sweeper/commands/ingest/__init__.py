"""Import other tools' results into the same store: recognize and read files, and derive this project's metrics."""
