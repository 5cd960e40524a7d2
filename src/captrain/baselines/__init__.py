"""Baselines that TRACE is compared with: one module, one stage and one row of the table each."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
