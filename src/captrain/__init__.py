"""captrain: find the capabilities an LLM agent lacks, train one LoRA adapter for each, route tasks to them.

Implements TRACE (arXiv 2604.05336) as a cached, resumable pipeline. Data flows one way through the packages: spec ->
rollouts -> labels -> capabilities -> environments -> adapters -> routes -> evaluation -> figures -> report. Importing
captrain or one of its packages is cheap: an exported name (`__init__.pyi`) is imported on first use, and heavy
libraries such as torch inside the functions that need them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0"
