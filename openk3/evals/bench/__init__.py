"""Benchmarks: how fast a thing is, beside its peers and beside what the machine could do at best."""
