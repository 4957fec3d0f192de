"""Trains small models, on one device or on several."""

from tinytrainer.trainer import Trainer

__all__ = ["Trainer"]
