"""Import results of other tools into the MLflow store: detect file formats, read the files, and derive metrics."""
