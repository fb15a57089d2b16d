"""`python -m sweeper calibrate`: measure the local devices and links, and write their rates to files for plans."""
