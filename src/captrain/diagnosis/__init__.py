"""Diagnosis of an agent from its own logs: no model, no network, no torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
