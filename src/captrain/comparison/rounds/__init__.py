"""TRACE from solutions, in rounds: taught, diagnosed again on fresh tasks, taught what is still lacking, and routed."""
