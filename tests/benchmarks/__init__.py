"""The programs under benchmarks that more than one person runs."""
