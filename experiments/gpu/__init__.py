"""Measures on a real accelerator, with torch, transformers and pydantic; without Ray, data or internet."""
