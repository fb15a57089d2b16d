"""What measures: timers, caches, telemetry, energy, traces."""
