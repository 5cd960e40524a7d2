"""captrain: find the capabilities an LLM agent lacks, train one LoRA adapter for each, route tasks to them.

Implements TRACE (arXiv 2604.05336) as a cached, resumable pipeline. Data flows one way through the rooms:
spec -> rollouts -> labels -> capabilities -> environments -> adapters -> routes -> evaluation -> figures -> report.
Importing the package or a room is cheap: what a room exports (`__init__.pyi`) is imported when it is first asked for,
torch and its friends within the functions that need them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0"
