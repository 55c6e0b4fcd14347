"""Other libraries' models with cukern's ops. transformers: `cukern.patch`, and attention for
`attn_implementation="cukern"`."""
