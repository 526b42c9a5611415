"""Products of activations with a weight matrix, in the dtype of the activations."""

from .api import project, project_each, project_wide, unembed

__all__ = ["project", "project_each", "project_wide", "unembed"]
