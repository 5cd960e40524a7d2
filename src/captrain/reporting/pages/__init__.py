"""The static report of a run: pages that open from a disk, without a server, a network or a build step.

`files` reads results/ and artifacts/, `data` gathers what the pages say, `shards` cuts the rollouts into files that a
page loads when it needs them, `pages` renders and writes. Nothing is computed anew but marks, gains by kind and what is
drawn.
"""

from captrain.reporting.pages.site import build

__all__ = ["build"]
