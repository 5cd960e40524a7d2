"""captrain: find the capabilities an LLM agent lacks, train one LoRA adapter for each, route tasks to them.

Implements TRACE (arXiv 2604.05336) as a cached, resumable pipeline. Data flows one way through the modules:
spec -> rollouts -> labels -> capabilities -> environments -> adapters -> routes -> evaluation -> figures.
Importing the package is cheap: torch and its friends are imported inside the functions that need them.
"""

__version__ = "0.1.0"
