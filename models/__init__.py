"""Reference models, tagged with the vocabulary. They use remat-kit's public API only, as any user's model would.

`models.transformer:gpt`, `models.transformer:llama` (NNX) and `models.linen:gpt_linen` (Linen) are workloads.
"""
