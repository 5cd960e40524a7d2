"""Models and what they say: weights, LoRA adapters, chat templates, endpoints, structured answers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
