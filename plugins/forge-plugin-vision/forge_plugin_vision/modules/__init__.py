"""Modules of vision-language models; they import torch."""
