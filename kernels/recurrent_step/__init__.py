"""One token of a layer with a state of constant size: everything between its projections."""

from .api import recurrent_step, supports
from .types import HeadOutput, PerHead, StepResult, TokenInput

__all__ = ["HeadOutput", "PerHead", "StepResult", "TokenInput", "recurrent_step", "supports"]
