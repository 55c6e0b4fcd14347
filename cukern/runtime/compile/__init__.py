"""From the text of a .cu file to machine code; knows no tensors."""
