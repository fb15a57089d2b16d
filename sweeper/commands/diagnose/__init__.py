"""Find what slows a training down, from its logs alone."""
