"""Splits as schedules: a strategy turns model and world into a layout and, per rank, a list of operations."""
