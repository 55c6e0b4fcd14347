"""GPT-2 with llm.c's file formats, on cukern's public ops.

files: headers and sizes of llm.c's files, and files that are replaced in one step. data: text to tokens to
batches, and back to text. checkpoint: weights, optimizer state, debug state. hugging_face: weights of its
folders. model: the network. settings, train: the loop. parallel: several processes. evaluate: validation
loss, HellaSwag, text. On the command line: `cukern gpt2 --help`.
"""
