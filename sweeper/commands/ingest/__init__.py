"""Import other tools' results into the same store: recognise and read files, and derive this project's metrics."""
