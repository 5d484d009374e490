"""Context-parallel attention: a rank holds some of the tokens and attends over all of them.

Ulysses (arXiv:2309.14509) exchanges heads for tokens, ring (arXiv:2310.01889) passes keys and values round, and the two
work together in any shape (arXiv:2405.07719). Any lengths, any number of heads, key masks and grouped keys are ordinary
input. Knows neither families nor plans, nor how it is plugged into diffusers.
"""

from .sequence import SequenceParallel, context_parallel_attention

__all__ = ["SequenceParallel", "context_parallel_attention"]
