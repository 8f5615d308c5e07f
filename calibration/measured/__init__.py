"""Measured runs of real servers: read, replayed in simulation, and compared (docs/accuracy.md)."""
