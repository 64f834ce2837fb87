"""Benchmarks. The programs that are compared take turns, because the speed of a shared machine changes over time."""
