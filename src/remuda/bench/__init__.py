"""Benchmarks. The programs that they compare take turns, because the speed of a shared machine changes over time."""
