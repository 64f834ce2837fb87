"""Samplers, the worker processes that they use, and evaluation."""
