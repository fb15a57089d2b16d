"""Measuring instruments: timers, caches, telemetry, energy, traces."""
