"""Samplers and evaluation."""
