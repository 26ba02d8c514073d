"""Reference models, tagged with the vocabulary. They use remat-kit's public API only, as any user's model would.

Workloads in NNX: `models.transformer:gpt` and `models.transformer:llama`, `models.moe:moe` (a mixture of experts),
`models.vision:vit` (a Vision Transformer for large images) and `models.unet:unet` (convolutions, nothing tagged). In
Linen: `models.linen:gpt_linen`.
"""
