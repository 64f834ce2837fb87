"""Benchmarks whose contenders take turns, because the speed of a shared machine drifts."""
