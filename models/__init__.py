"""Layers that know their own forward, input gradient and weight gradient, and nothing of splits."""
