"""The comparison on the test split: baselines, TRACE in rounds, rows, statistics, power, sweeps, published numbers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
