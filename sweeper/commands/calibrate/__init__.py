"""Measure the local devices and links, and write the measured rates to files for plans."""
