"""`cukern gpt2`: trains, evaluates, samples, checks and profiles GPT-2 with llm.c's files."""

import typer

from cukern.cli.gpt2_train import train

app = typer.Typer(no_args_is_help=True, help="GPT-2 with llm.c's file formats, on cukern's kernels.")
app.command()(train)
