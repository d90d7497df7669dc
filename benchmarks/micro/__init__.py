"""Micro-benchmarks of single parts, each beside its physical floor."""
