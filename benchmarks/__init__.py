"""Load generators and micro-benchmarks; run by hand, never by the test suite."""
