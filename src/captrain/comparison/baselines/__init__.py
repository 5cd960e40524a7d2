"""Baselines that TRACE is compared with: one module, one stage and one row of the table each."""
