"""Benchmarks. The programs that they compare run in turns, because the speed of a shared machine drifts."""
