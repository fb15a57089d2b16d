"""Find out what slows down a training run, from its logs alone."""
