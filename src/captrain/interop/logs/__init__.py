"""Readers of other tools' logs, one module for each format."""
