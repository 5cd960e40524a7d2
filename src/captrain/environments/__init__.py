"""Training environments: synthesized, examined for their passports, and run in a sandbox."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
