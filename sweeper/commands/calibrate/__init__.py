"""`python -m sweeper calibrate`: the rates of the devices and links that are here, in files that plans use."""
