"""How the shipped demos were trained: `make demo`, `make llm-demo`. Nothing of the product needs this."""
