"""What only a real accelerator can tell. Needs torch, transformers and pydantic; no Ray, no data, no network."""
