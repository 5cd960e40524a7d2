"""Benchmarks under the environment contract, and worlds in which logged rollouts are replayed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
