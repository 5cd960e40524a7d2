"""What a configuration will cost and what a comparison can detect, before anything is spent."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
