"""Write files that rerun one trial of a sweep."""
