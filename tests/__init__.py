"""Tests mirror the package: tests/PART/test_FILE.py for tpconvert/PART/FILE.py."""
