"""The configuration files, kept as package data so that `pkg://conf` finds them after any kind of install."""
