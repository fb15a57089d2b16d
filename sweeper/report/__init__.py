"""Reading results: tables from what sweeps have left behind."""
