"""Capabilities that an agent lacks: proposed and labelled by an analyst, selected by contrast."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
