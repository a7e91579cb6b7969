"""Benchmarks: ratios against peers or against a limit, measured in one run. `make bench`."""
