"""Logs of other people's agents as rollouts, one module a format."""
