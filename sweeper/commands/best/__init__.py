"""One trial of a sweep as files that run it again."""
