"""Measuring instruments: timers, cache flushes, telemetry, energy and traces."""
