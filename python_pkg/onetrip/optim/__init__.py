"""Optimizers: Adam and AdamW over all parameters in one step, with two bytes of state a parameter."""

from .adam import Adam8bit, AdamW8bit
from .release import GradientRelease, enable_gradient_release
from .trainer import trainer_optimizer

__all__ = ["Adam8bit", "AdamW8bit", "GradientRelease", "enable_gradient_release", "trainer_optimizer"]
