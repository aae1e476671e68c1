"""Claims of speed and memory as rows of one table, `python -m benchmarks`; scripts of studies."""
