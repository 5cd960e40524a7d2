"""Worlds in which agents act: benchmarks under the one environment contract, and the tiny base of the embedded one."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
