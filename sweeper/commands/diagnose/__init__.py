"""Find out what slows down a training run, using only its logs."""
