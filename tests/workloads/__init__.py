"""Workloads and cell functions for the tests of the sweep. Each is small, and most are bad on purpose."""
