"""Methods compared on the test split: baselines, TRACE from solutions in rounds, arms, rows, statistics, sweeps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
