"""Products of activations with a weight matrix, in the dtype of the activations."""

from .api import is_one_token_on_gpu, project, project_to_float32, unembed

__all__ = ["is_one_token_on_gpu", "project", "project_to_float32", "unembed"]
