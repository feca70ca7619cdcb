"""Turn a Hugging Face classifier into an early-exit one, without touching its weights."""
