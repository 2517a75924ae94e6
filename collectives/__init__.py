"""The wire: groups of ranks, operations between them, and what they send."""
