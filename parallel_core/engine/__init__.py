"""The controller's side: groups of ranks, requests, deadlines, failure, memory ledger, shutdown.

Knows neither diffusers nor ComfyUI.
"""

from .engine import Engine
from .group import GroupKey, RankReply

__all__ = ["Engine", "GroupKey", "RankReply"]
