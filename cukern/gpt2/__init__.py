"""GPT-2 with llm.c's file formats, on cukern's public ops.

files: headers, sizes, and files that are replaced whole. tokenizer: tokens to text. data: text to token shards to batches.
checkpoint: weights, optimizer state, debug state, and Hugging Face's weights.
"""
