"""What a researcher does with runs, behind the `cleanba` command."""
